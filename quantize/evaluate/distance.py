"""How far the quantized model's predictions are from the BF16 model's, token by token.

Each scored token has the two models' negative log-likelihoods, the divergence KL(BF16 || quantized) of their predictions
over the whole vocabulary, and whether both have the same first choice. The logits of a few tokens exist at a time: those
of all tokens over a vocabulary of 248,320 would not fit anywhere.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

LOGITS_AT_ONCE = 32_000_000  # logits in float32 a chunk: 128 MB a copy, about six copies
RESAMPLES = 2000
CONFIDENCE = 0.95

Float = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Scores:
    """What was measured on each scored token; all arrays are of that length.

    Attributes:
        row: The row that it is of.
        nll_bf16: Nats.
        nll_quantized: Nats.
        kl: KL(BF16 || quantized), nats.
        same: Whether the first choice is the same.
    """

    row: npt.NDArray[np.int64]
    nll_bf16: Float
    nll_quantized: Float
    kl: Float
    same: npt.NDArray[np.bool_]

    @classmethod
    def joined(cls, parts: list["Scores"]) -> "Scores":
        """Several, one after the other."""
        return cls(*(np.concatenate([getattr(p, f) for p in parts]) for f in cls.__dataclass_fields__))


@dataclass(frozen=True)
class Estimate:
    """A number with its 95 % bootstrap interval over rows."""

    value: float
    low: float
    high: float

    def as_json(self) -> dict[str, float]:
        """Plain data."""
        return {"value": self.value, "low": self.low, "high": self.high}


def score(
    rows: list[int], ids: Any, hidden: tuple[Any, Any], heads: tuple[Any, Any], progress: Callable[[int], None]
) -> Scores:
    """Scores every token of a batch but the first of each row.

    Args:
        rows: The rows' numbers, B of them.
        ids: Token ids [B, T].
        hidden: After the final norm, of the BF16 model and the quantized one: [B, T, H], BF16.
        heads: The two output matrices [V, H], BF16, on the same device.
        progress: Called with the number of tokens.
    """
    import torch

    targets = ids[:, 1:].reshape(-1).to(hidden[0].device)
    states = [h[:, :-1].reshape(-1, h.shape[-1]) for h in hidden]
    step = max(1, LOGITS_AT_ONCE // heads[0].shape[0])
    columns: list[list[Any]] = [[], [], [], []]
    with torch.inference_mode():
        for first in range(0, len(targets), step):
            piece = slice(first, first + step)
            truth, other = (
                torch.nn.functional.linear(s[piece], head).float().log_softmax(-1)
                for s, head in zip(states, heads, strict=True)
            )
            target = targets[piece, None]
            found = (
                -truth.gather(1, target)[:, 0],
                -other.gather(1, target)[:, 0],
                (truth.exp() * (truth - other)).sum(-1).clamp(min=0),
                truth.argmax(-1) == other.argmax(-1),
            )
            for column, part in zip(columns, found, strict=True):
                column.append(part.cpu())
            progress(len(target))
    nll, other_nll, kl, same = (torch.cat(column).numpy() for column in columns)
    row = np.repeat(np.array(rows, np.int64), ids.shape[1] - 1)
    return Scores(row, nll.astype(np.float64), other_nll.astype(np.float64), kl.astype(np.float64), same)


def summarize(scores: Scores, seed: int = 0) -> dict[str, Estimate]:
    """The numbers of a report, each with an interval: rows are drawn again with replacement, tokens of a row stay together."""
    numbers, index = np.unique(scores.row, return_inverse=True)
    count = len(numbers)
    draws = np.random.default_rng(seed).multinomial(count, [1 / count] * count, size=RESAMPLES)
    draws = np.vstack([np.ones(count, draws.dtype), draws])  # the first is the sample itself
    tokens = draws @ np.bincount(index, minlength=count)

    def mean(values: Float) -> Float:
        return np.asarray(draws @ np.bincount(index, values, minlength=count) / tokens, np.float64)

    truth, quantized = mean(scores.nll_bf16), mean(scores.nll_quantized)
    samples = {
        "nll_bf16": truth,
        "nll_quantized": quantized,
        "nll_increase": mean(scores.nll_quantized - scores.nll_bf16),
        "perplexity_bf16": np.exp(truth),
        "perplexity_quantized": np.exp(quantized),
        "kl_mean": mean(scores.kl),
        "kl_p99": _quantile(scores.kl, index, draws, 0.99),
        "top1_agreement": mean(scores.same.astype(np.float64)),
    }
    return {name: _estimate(values) for name, values in samples.items()}


def difference(one: Scores, other: Scores, seed: int = 0) -> Estimate:
    """How much larger the first's mean KL is than the second's, on the same rows; the interval is of the difference."""
    paired = Scores(one.row, one.nll_quantized, other.nll_quantized, one.kl - other.kl, one.same)
    return summarize(paired, seed)["kl_mean"]


def _quantile(values: Float, index: npt.NDArray[np.intp], draws: npt.NDArray[Any], share: float) -> Float:
    """The value that `share` of the tokens do not exceed, for each draw of rows."""
    order = np.argsort(values)
    ordered, rows = values[order], index[order]
    found = np.empty(len(draws))
    for i, draw in enumerate(draws):
        weight = np.cumsum(draw[rows])
        found[i] = ordered[min(np.searchsorted(weight, share * weight[-1]), len(ordered) - 1)]
    return found


def _estimate(samples: Float) -> Estimate:
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(samples[1:], [tail, 1 - tail])
    return Estimate(float(samples[0]), float(low), float(high))


def as_json(quality: Mapping[str, Estimate]) -> dict[str, dict[str, float]]:
    """Plain data."""
    return {name: estimate.as_json() for name, estimate in quality.items()}
