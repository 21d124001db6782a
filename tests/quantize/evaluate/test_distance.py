"""Scores of tokens and their intervals, against torch's own loss functions and against arithmetic by hand."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quantize.evaluate import distance
from quantize.evaluate.distance import Scores, score, summarize


def inputs(vocabulary: int = 300) -> tuple:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocabulary, (3, 20), generator=generator)
    hidden = torch.randn(3, 20, 16, generator=generator).bfloat16()
    heads = torch.randn(vocabulary, 16, generator=generator).bfloat16()
    return ids, (hidden, hidden + 0.1 * torch.randn(3, 20, 16, generator=generator).bfloat16()), (heads, heads * 1.1)


def test_scores_are_torchs_losses() -> None:
    ids, hidden, heads = inputs()
    scores = score([4, 5, 6], ids, hidden, heads, lambda _: None)
    logits = [(h @ w.T).float()[:, :-1] for h, w in zip(hidden, heads, strict=True)]
    for column, mine in zip(logits, (scores.nll_bf16, scores.nll_quantized), strict=True):
        theirs = torch.nn.functional.cross_entropy(column.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        np.testing.assert_allclose(mine, theirs.numpy(), rtol=1e-5, atol=1e-6)
    p, q = (column.log_softmax(-1).flatten(0, 1) for column in logits)
    kl = torch.nn.functional.kl_div(q, p, log_target=True, reduction="none").sum(-1)
    np.testing.assert_allclose(scores.kl, kl.numpy(), atol=1e-5)
    assert scores.same.tolist() == (p.argmax(-1) == q.argmax(-1)).tolist()
    assert scores.row.tolist() == [4] * 19 + [5] * 19 + [6] * 19


class Largest(TorchDispatchMode):
    """The largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return result


def test_logits_of_all_tokens_never_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    ids, hidden, heads = inputs(vocabulary=2000)
    whole = score([0, 1, 2], ids, hidden, heads, lambda _: None)
    monkeypatch.setattr(distance, "LOGITS_AT_ONCE", 5 * 2000)
    seen = []
    with Largest() as largest:
        pieces = score([0, 1, 2], ids, hidden, heads, seen.append)
    assert largest.numel == 5 * 2000
    assert seen == [5] * 11 + [2]
    np.testing.assert_allclose(pieces.kl, whole.kl, atol=1e-6)
    np.testing.assert_allclose(pieces.nll_quantized, whole.nll_quantized, rtol=1e-6)


def test_intervals_are_over_rows() -> None:
    rng = np.random.default_rng(3)
    row = np.repeat(np.arange(40), 50)
    level = rng.normal(2.0, 0.5, 40)[row]  # tokens of a row are alike, so their number says nothing
    scores = Scores(row, level, level + 0.1, np.full(2000, 0.02), np.arange(2000) % 10 != 0)
    found = summarize(scores)
    assert found["nll_bf16"].value == pytest.approx(level.mean())
    width = found["nll_bf16"].high - found["nll_bf16"].low
    assert width == pytest.approx(2 * 1.96 * level[::50].std() / np.sqrt(40), rel=0.2)
    assert found["nll_increase"].high - found["nll_increase"].low < 1e-9  # paired: the rows' own levels cancel
    assert found["perplexity_quantized"].value == pytest.approx(np.exp(level.mean() + 0.1))
    assert found["top1_agreement"].value == pytest.approx(0.9)
    assert found["kl_mean"].value == pytest.approx(0.02)


def test_the_percentile_is_of_tokens() -> None:
    kl = np.arange(1000, dtype=np.float64) / 1000
    scores = Scores(np.arange(1000) // 100, kl, kl, kl, kl > 0)
    found = summarize(scores)["kl_p99"]
    assert found.value in (0.989, 0.990)
    assert 0.5 < found.low < found.value <= found.high <= 0.999
