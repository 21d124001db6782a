"""What stands out: a module whose values are far from the source's, a tensor that should be the source's and is not.

A healthy checkpoint has none. The limits: NVFP4 of any weights that look like noise gives about 20 dB and FP8 31 dB, and
modules of one kind differ by a few tenths; a scale that is off by 1.5 gives 6 dB, other weights less than 0.
"""

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from assemble.architecture import fused_group
from assemble.formats import FP8
from quantize.evaluate.changes import SAME
from quantize.evaluate.modules import ModuleError
from quantize.evaluate.walk import InputRange, LayerError, Walked

FLOOR_DB = {FP8: 25.0}  # below which an FP8 matrix is not just rounded
NVFP4_FLOOR_DB = 14.0
BELOW_KIND_DB = 4.0  # how far below the median of its kind a module may lie
SPREADS = 6.0  # and how many times the kind's spread (the median distance from the median, as a standard deviation)
OFF = 0.1  # a gain this far from 1 is a wrong scale
CLIPPED = 0.01  # share of inputs beyond what a static scale holds
INPUT_FLOOR_DB = 20.0
LAYER_TIMES, LAYER_ERROR = 5.0, 0.2  # a layer that adds so many times the others' error, and that much


@dataclass(frozen=True)
class Outlier:
    """Something that stands out: a module, tensor or layer, and what is wrong with it, in words."""

    where: str
    text: str


def outliers(walked: Walked) -> list[Outlier]:
    """Everything that stands out, the worst first."""
    found = [*_modules(walked.modules), *(Outlier(c.name, c.text) for c in walked.changes), *_inputs(walked.inputs)]
    named = {outlier.where for outlier in found}
    found += [Outlier(c.name, c.text) for c in walked.fused if not named & {c.name, *fused_group(c.name)}]
    return found + list(_layers(walked.layers, [outlier.where for outlier in found]))


def _modules(errors: Sequence[ModuleError]) -> list[Outlier]:
    kinds: dict[tuple[str, str], list[float]] = {}
    for error in errors:
        kinds.setdefault(_kind(error), []).append(error.sqnr_db)
    usual = {kind: _centre(values) for kind, values in kinds.items()}
    far = [e for e in errors if _is_far(e, *usual[_kind(e)])]
    far.sort(key=lambda e: (not math.isnan(e.sqnr_db), e.sqnr_db))
    return [Outlier(e.name, _reason(e, usual[_kind(e)][0])) for e in far]


def _kind(error: ModuleError) -> tuple[str, str]:
    return error.scheme, error.name.rpartition(".")[2]


def _centre(values: list[float]) -> tuple[float, float]:
    finite = [v for v in values if math.isfinite(v)] or [math.inf]
    middle = statistics.median(finite)
    return middle, 1.4826 * statistics.median(abs(v - middle) for v in finite) if math.isfinite(middle) else 0.0


def _is_far(error: ModuleError, median: float, spread: float) -> bool:
    if math.isnan(error.sqnr_db) or error.sqnr_db < FLOOR_DB.get(error.scheme, NVFP4_FLOOR_DB):
        return True
    return error.sqnr_db < median - max(BELOW_KIND_DB, SPREADS * spread)


def _reason(error: ModuleError, median: float) -> str:
    if math.isnan(error.sqnr_db):
        return "reads back as NaN or infinity in places"
    usual = f"SQNR {error.sqnr_db:.1f} dB" + (f"; modules of its kind have {median:.1f}" if median - error.sqnr_db > 1 else "")
    if error.holds:
        return f"holds the values of {error.holds} ({usual})"
    if error.cosine == 0 and error.gain == 0:
        return f"reads back as zeros ({usual})"
    if error.cosine > SAME and abs(error.gain - 1) > OFF:
        return f"reads back as {error.gain:.2g} times the source: a scale is off ({usual})"
    return f"is far from the source: cosine {error.cosine:.3f}, largest error {error.max_error:.3g} ({usual})"


def _inputs(ranges: Iterable[InputRange]) -> Iterator[Outlier]:
    for r in ranges:
        if not r.sqnr_db >= INPUT_FLOOR_DB or r.clipped > CLIPPED:
            yield Outlier(
                r.name,
                f"has an input_scale ({r.scale:.3g}) that holds inputs up to {448 * r.scale:.3g}; on this text they reach "
                f"{r.largest:.3g}, {r.clipped:.1%} are clipped, and the rounded inputs have {r.sqnr_db:.1f} dB",
            )


def _layers(layers: Sequence[LayerError], named: Sequence[str]) -> Iterator[Outlier]:
    """Layers that add far more error than the others, where nothing inside them was named."""
    if len(layers) < 3:
        return
    usual = statistics.median(layer.added for layer in layers)
    for layer in layers:
        inside = f".layers.{layer.index}."
        if not layer.added <= max(LAYER_ERROR, LAYER_TIMES * usual) and not any(inside in name for name in named):
            yield Outlier(
                f"decoder layer {layer.index}", f"adds an error of {layer.added:.2f}; the median layer adds {usual:.2f}"
            )
