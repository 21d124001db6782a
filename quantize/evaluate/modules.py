"""How far each written matrix is from the one it was made of, by its values alone.

A matrix w was written and reads back as v:

    SQNR      10 log10(|w|² / |w - v|²), in dB: 6 dB more halve the error. NVFP4 gives about 20, FP8 about 31.
    cosine    of the angle between w and v; a wrong scale leaves it at 1, other weights bring it to 0
    gain      <w, v> / |w|²: 1 when the scale is right, 1.5 when it is off by 1.5
    zero      share of blocks (NVFP4: 16 elements; FP8: single ones) that read back as nothing and were something
    saturated share of blocks whose scale is E4M3's largest, 448 (FP8: of elements of magnitude 448)

A stack of experts is measured at once, and each expert has its own numbers.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from assemble.formats import BLOCK, FP8
from quantize.evaluate.dequantize import E4M3_MAX
from quantize.evaluate.matrix import Matrix


@dataclass(frozen=True)
class ModuleError:
    """One matrix, measured.

    Attributes:
        name: Module name in the checkpoint.
        layer: Decoder layer; None for lm_head.
        scheme: As stored.
        sqnr_db: Infinite when nothing differs.
        cosine: Between written and source, 1 at best.
        gain: Projection of the written values on the source's, 1 at best.
        max_error: Largest |w - v|.
        zero: Share of blocks that were lost, 0 to 1.
        saturated: Share of blocks at the end of the scale's range, 0 to 1.
        weights: Number of elements.
        holds: The source's matrix whose values it seems to hold instead, if another's.
    """

    name: str
    layer: int | None
    scheme: str
    sqnr_db: float
    cosine: float
    gain: float
    max_error: float
    zero: float
    saturated: float
    weights: int
    holds: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Plain data; what is not finite becomes None."""
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in asdict(self).items()}


def measure(name: str, layer: int | None, written: Matrix, source: Matrix) -> list[ModuleError]:
    """Compares a written matrix, or a stack of experts, with the source's.

    Args:
        name: Module name; of a stack, with the experts' numbers left out (`….mlp.experts.gate_proj`).
        layer: Decoder layer.
        written: What the checkpoint holds, on the device that is to compute.
        source: What it was made of, same shape.
    """
    totals = _totals(written, source)
    names = [name]
    if written.stacked:
        container, _, leaf = name.rpartition(".")
        names = [f"{container}.{e}.{leaf}" for e in range(written.shape[0])]
    weights = math.prod(written.shape) // len(names)
    errors = []
    for i, each in enumerate(names):
        row = {key: float(column[i]) for key, column in totals.items()}
        signal, noise, other = row["signal"], row["noise"], row["other"]
        cosine = row["product"] / math.sqrt(signal * other) if signal * other > 0 else float(signal == other)
        blocks = weights / BLOCK if written.packed else weights
        errors.append(
            ModuleError(
                each,
                layer,
                written.scheme or "BF16",
                decibel(signal, noise),
                cosine,
                row["product"] / signal if signal else 1.0,
                row["largest"],
                row["zero"] / blocks,
                row["saturated"] / blocks,
                weights,
            )
        )
    return errors


def decibel(signal: float, noise: float) -> float:
    """10 log10(signal / noise) of two sums of squares; NaN stays NaN."""
    if math.isnan(noise):
        return math.nan
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf


def cosine_of(first: Matrix, second: Matrix) -> float:
    """The cosine between two matrices of equal shape."""
    totals = _totals(first, second)
    product, signal, other = (float(totals[k].sum()) for k in ("product", "signal", "other"))
    return product / math.sqrt(signal * other) if signal * other > 0 else 0.0


def _totals(written: Matrix, source: Matrix) -> dict[str, Any]:
    """Sums over each matrix, float64 on the CPU: [1], or [E] for a stack."""
    import torch

    found: list[dict[str, Any]] = []
    for part, origin in _pairs(written, source):
        values, truth = part.values(), origin.values()
        error = (values - truth).abs()
        measured = {
            "signal": truth.square(),
            "other": values.square(),
            "product": values * truth,
            "noise": error.square(),
            **_blocks(part, values, truth),
        }
        flat = {key: _rows(value, written).sum(1).double().cpu() for key, value in measured.items()}
        found.append(flat | {"largest": _rows(error, written).amax(1).double().cpu()})
    if written.stacked:
        return {key: torch.cat([part[key] for part in found]) for key in found[0]}
    together = {key: torch.stack([part[key] for part in found]) for key in found[0]}
    return {key: v.amax(0) if key == "largest" else v.sum(0) for key, v in together.items()}


def _rows(values: Any, matrix: Matrix) -> Any:
    """A row for each matrix: of a stack, or one."""
    return values.flatten(1) if matrix.stacked else values.reshape(1, -1)


def _pairs(matrix: Matrix, other: Matrix) -> Iterator[tuple[Matrix, Matrix]]:
    """Both, a part at a time."""
    if matrix.shape != other.shape:
        raise ValueError(f"shapes differ: {matrix.shape}, {other.shape}")
    for (_, part), (_, its) in zip(matrix.parts(), other.parts(), strict=True):
        yield part, its


def _blocks(part: Matrix, values: Any, truth: Any) -> dict[str, Any]:
    """Booleans as float32: which blocks read back as zero though they were not, and which are saturated."""
    if not part.packed:
        top = part.weight.float().abs() == E4M3_MAX if part.scheme == FP8 else values != values  # noqa: PLR0124
        return {"zero": ((values == 0) & (truth != 0)).float(), "saturated": top.float()}
    lost = (values.unflatten(-1, (-1, BLOCK)) == 0).all(-1) & (truth.unflatten(-1, (-1, BLOCK)) != 0).any(-1)
    return {"zero": lost.float(), "saturated": (part.scale.float() == E4M3_MAX).float()}
