"""An evaluation's results as plain data: what goes into report.json, the stage's record and the model card."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from quantize.evaluate.distance import Estimate, Scores, as_json
from quantize.evaluate.gates import Gate
from quantize.evaluate.modules import ModuleError
from quantize.evaluate.outliers import Outlier
from quantize.evaluate.rows import HeldOut
from quantize.evaluate.simulation import FP8_ACTIVATIONS, FP8_KV, FUSED_SCALES, NOT_SIMULATED
from quantize.evaluate.walk import Walked
from quantize.evaluate.weights import Weights

KL_BINS = 48


@dataclass(frozen=True)
class Report:
    """One checkpoint, evaluated.

    Attributes:
        name: The checkpoint's directory's name.
        source: The source's.
        held_out: The rows.
        walked: Errors of modules and layers, and the scores.
        quality: The whole model's numbers.
        outliers: What stands out.
        mtp: What was measured of the head, plain data; None: it was not.
        mtp_left_out: Why not.
        gates: The recipe's limits, judged.
        size_bytes: Tensor bytes of the checkpoint.
        source_bytes: Of the source.
        simulated: What was simulated.
        not_simulated: What was not.
        device: `cpu`, or the GPU's name.
        seconds: How long it took.
        peak_memory_bytes: Host memory at most.
    """

    name: str
    source: str
    held_out: HeldOut
    walked: Walked
    quality: Mapping[str, Estimate]
    outliers: Sequence[Outlier]
    mtp: Mapping[str, Any] | None
    mtp_left_out: str | None
    gates: Sequence[Gate]
    size_bytes: int
    source_bytes: int
    simulated: Sequence[str]
    not_simulated: Sequence[str]
    device: str
    seconds: float
    peak_memory_bytes: int

    def facts(self) -> dict[str, Any]:
        """What the record and the card need: everything but the long lists."""
        layers = self.walked.layers
        worst = max(layers, key=lambda layer: layer.added if math.isfinite(layer.added) else math.inf)
        plain: dict[str, Any] = _finite(
            {
                "name": self.name,
                "source": self.source,
                "data": self.held_out.as_json(),
                "quality": as_json(self.quality),
                "schemes": schemes(self.walked.modules),
                "layers": {
                    "count": len(layers),
                    "largest_added": worst.added,
                    "largest_added_layer": worst.index,
                    "accumulated_at_end": layers[-1].accumulated,
                },
                "outliers": [asdict(outlier) for outlier in self.outliers],
                "mtp": self.mtp,
                "mtp_left_out": self.mtp_left_out,
                "size_bytes": self.size_bytes,
                "source_bytes": self.source_bytes,
                "simulated": list(self.simulated),
                "not_simulated": list(self.not_simulated),
                "gates": [gate.as_json() for gate in self.gates],
                "device": self.device,
                "seconds": round(self.seconds, 1),
                "peak_memory_bytes": self.peak_memory_bytes,
            }
        )
        return plain

    def as_json(self) -> dict[str, Any]:
        """Everything but the modules, which are a file of their own: a mixture has tens of thousands."""
        plain: dict[str, Any] = _finite(
            self.facts()
            | {
                "layer_errors": [asdict(layer) for layer in self.walked.layers],
                "inputs": [asdict(r) for r in self.walked.inputs],
                "kl_histogram": histogram(self.walked.scores),
            }
        )
        return plain

    def tokens_per_step(self, num_drafts: int) -> float | None:
        """Tokens a step of the quantized body with its head; None where that was not measured."""
        return tokens_per_step(self.mtp, num_drafts)

    def prompts(self, count: int, tokens: int) -> list[dict[str, Any]]:
        """The first rows, cut, with the likelihood that the quantized checkpoint gives them: what a server can be held against.

        Returns:
            `prompt_token_ids`, and `nll`: mean nats a token over all but the first.
        """
        scores = self.walked.scores
        prompts = []
        for number, row in enumerate(self.held_out.rows[:count]):
            nll = scores.nll_quantized[scores.row == number][: tokens - 1]
            prompts.append({"prompt_token_ids": row[:tokens].tolist(), "nll": float(nll.mean())})
        return prompts


def tokens_per_step(mtp: Mapping[str, Any] | None, num_drafts: int) -> float | None:
    """Tokens a step of the quantized body with its head, from what was measured of the head."""
    found = ((mtp or {}).get("bodies") or {}).get("quantized") or {}
    value = found.get("tokens_per_step", {}).get(str(num_drafts))
    return None if value is None else float(value)


def schemes(modules: Sequence[ModuleError]) -> list[dict[str, Any]]:
    """The matrices of each scheme, summarized."""
    groups: dict[str, list[ModuleError]] = {}
    for module in modules:
        groups.setdefault(module.scheme, []).append(module)
    found = []
    for scheme, members in sorted(groups.items()):
        lowest = min(members, key=lambda m: -math.inf if math.isnan(m.sqnr_db) else m.sqnr_db)
        blocks = sum(m.weights for m in members)
        found.append(
            {
                "scheme": scheme,
                "modules": len(members),
                "sqnr_db_median": statistics.median(m.sqnr_db for m in members),
                "sqnr_db_lowest": lowest.sqnr_db,
                "lowest": lowest.name,
                "cosine_lowest": min(m.cosine for m in members),
                "zero": sum(m.zero * m.weights for m in members) / blocks,
                "saturated": sum(m.saturated * m.weights for m in members) / blocks,
            }
        )
    return _finite(found)  # type: ignore[no-any-return]


def histogram(scores: Scores) -> dict[str, Any]:
    """How many tokens have which KL: bins of equal width in its logarithm, what is below 1e-8 in the first; NaN in none."""
    import numpy as np

    kl = np.maximum(scores.kl[np.isfinite(scores.kl)], 1e-8)
    edges = np.logspace(-8, max(1.0, math.ceil(math.log10(kl.max(initial=1.0)))), KL_BINS + 1)
    counts, _ = np.histogram(kl, edges)
    return {"edges": edges.tolist(), "tokens": counts.tolist()}


def simulated_by(weights: Weights) -> tuple[list[str], list[str]]:
    """What is simulated for a checkpoint, and what is not."""
    done = ["weights as the files hold them, dequantized to BF16", FUSED_SCALES]
    done += [FP8_ACTIVATIONS] if "FP8" in weights.activations else []
    done += [FP8_KV] if weights.kv_fp8 else []
    left = list(NOT_SIMULATED)
    if weights.fp8_experts:
        left.insert(0, "FP8 activations of routed experts: their inputs stay BF16")
    if "NVFP4" in weights.activations:
        left.insert(
            0, "4-bit activations of NVFP4 W4A4 modules: their inputs stay BF16, so the model looks better than it is served"
        )
    return done, left


def _finite(value: Any) -> Any:
    """Plain data in which what is not finite is None, as JSON has no word for it."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list) else value
