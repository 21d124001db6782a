"""Streamed numbers against a resident model's, and the walk's own laws."""

import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from assemble.checkpoint import Checkpoint
from quantize.console import Reporter
from quantize.evaluate.distance import summarize
from quantize.evaluate.rows import Batch, batches, read_rows
from quantize.evaluate.walk import Walked, walk
from quantize.evaluate.weights import Weights
from quantize.runner import Outcome
from quantize.streaming.decoder import Decoder
from recipes import loader
from recipes.schema import Evaluation
from tests.quantize.evaluate.resident import log_probabilities, resident_model

Walk = Callable[[Path, Path], Walked]


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_streamed_is_resident(
    kind: str, walked: Walk, few_batches: list[Batch], tiny: Path, tiny_moe: Path, request: pytest.FixtureRequest
) -> None:
    source = tiny if kind == "dense" else tiny_moe
    written = request.getfixturevalue("quantized" if kind == "dense" else "quantized_moe").out
    scores = walked(source, written).scores
    truth_model, written_model = resident_model(source, None), resident_model(source, written)
    nll, kl, rows = [[], []], [], []
    for batch in few_batches:
        truth, quantized = log_probabilities(truth_model, batch.ids), log_probabilities(written_model, batch.ids)
        for column, log in zip(nll, (truth, quantized), strict=True):
            column.append(-log[:, :-1].gather(-1, batch.ids[:, 1:, None]).flatten())
        kl.append((truth.exp() * (truth - quantized)).sum(-1)[:, :-1].flatten())
        rows += [row for row in batch.rows for _ in range(batch.ids.shape[1] - 1)]
    assert scores.row.tolist() == rows
    np.testing.assert_allclose(scores.nll_bf16, torch.cat(nll[0]).numpy(), atol=1e-5)
    np.testing.assert_allclose(scores.nll_quantized, torch.cat(nll[1]).numpy(), atol=1e-5)
    np.testing.assert_allclose(scores.kl, torch.cat(kl).numpy(), atol=1e-4)
    assert scores.kl.mean() > 0.001  # they are two models


def test_the_source_against_itself_has_no_error(walked: Walk, tiny: Path) -> None:
    found = walked(tiny, tiny)
    assert found.scores.kl.max() < 1e-6
    assert found.scores.same.all()
    assert all(layer.added == layer.accumulated == 0 for layer in found.layers)
    assert not found.modules
    assert not found.changes


def test_a_healthy_checkpoint(walked: Walk, tiny: Path, quantized: Outcome) -> None:
    found = walked(tiny, quantized.out)
    assert len(found.modules) == 26
    assert {m.scheme for m in found.modules} == {"FP8", "W4A16_NVFP4"}
    assert all(19 < m.sqnr_db < 22 for m in found.modules if m.scheme == "W4A16_NVFP4")
    assert all(30 < m.sqnr_db < 33 for m in found.modules if m.scheme == "FP8")
    assert all(0.98 < m.gain < 1.02 and m.cosine > 0.99 for m in found.modules)
    assert [layer.index for layer in found.layers] == [0, 1, 2, 3]
    assert found.layers[0].added == pytest.approx(found.layers[0].accumulated)
    assert found.layers[-1].accumulated > found.layers[-1].added > 0
    assert len(found.inputs) == 13
    assert all(r.largest > 0 and r.sqnr_db > 28 for r in found.inputs)
    assert summarize(found.scores)["kl_mean"].value < 0.1


def test_two_layers_are_in_memory(walked: Walk, quantized: Outcome, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[weakref.ref] = []
    most = 0
    build = Decoder.layer

    def counted(self: Decoder, index: int, tensors: dict) -> torch.nn.Module:
        nonlocal most
        module = build(self, index, tensors)
        built.append(weakref.ref(module))
        most = max(most, sum(ref() is not None for ref in built))
        return module

    monkeypatch.setattr(Decoder, "layer", counted)
    walked(tiny, quantized.out)
    assert len(built) == 8
    assert most == 2


def test_what_vllm_measured(heldout_file: Path, tiny: Path, quantized: Outcome) -> None:
    """vLLM 0.26 on an H200: 1.1688 and 1.1964 nats a token, rows 0 to 15 cut to 256 tokens (the model's README)."""
    from transformers import AutoTokenizer

    recipe = loader.load("demo").recipe
    rows = read_rows(
        heldout_file, AutoTokenizer.from_pretrained(tiny), Evaluation(rows=16, tokens=256), recipe.calibration, None
    )
    source, written = Weights(Checkpoint.open(tiny)), Weights(Checkpoint.open(quantized.out))
    found = summarize(walk(source, written, source, batches(rows.rows, 2048), "cpu", Reporter()).scores)
    assert rows.scored_tokens == 16 * 255
    assert found["nll_bf16"].value == pytest.approx(1.1688, abs=0.005)
    assert found["nll_quantized"].value == pytest.approx(1.1964, abs=0.005)


def test_experts_have_their_own_numbers(walked: Walk, tiny_moe: Path, quantized_moe: Outcome) -> None:
    found = walked(tiny_moe, quantized_moe.out)
    experts = [m for m in found.modules if ".experts." in m.name]
    assert len(experts) == 4 * 8 * 3
    assert len({m.sqnr_db for m in experts}) > 90
    assert all(18 < m.sqnr_db < 23 for m in experts)
    assert not found.changes


def test_layouts_of_experts_and_prefixes_make_no_difference(
    walked: Walk, tiny_moe: Path, quantized_moe: Outcome, make_variant: Callable[..., Path]
) -> None:
    split = make_variant(moe=True, split=True, shards=3)
    one, other = walked(tiny_moe, quantized_moe.out), walked(split, quantized_moe.out)
    np.testing.assert_array_equal(one.scores.nll_bf16, other.scores.nll_bf16)
    np.testing.assert_array_equal(one.scores.kl, other.scores.kl)
    assert one.modules == other.modules
    assert not other.changes
