"""The evaluation in the terminal."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from quantize.evaluate import words
from quantize.evaluate.walk import LayerError

SHOWN_LAYERS = 12
SHOWN_OUTLIERS = 12
BAR = 24  # characters


def print_report(
    facts: Mapping[str, Any], layers: Sequence[LayerError], console: Console, print_mtp: Callable[[Console], None] | None
) -> None:
    """Prints what a person wants to know first: predictions, what stands out, then where the error comes from."""

    def line(text: str = "") -> None:
        console.print(text, markup=False)

    line(f"{facts['name']} against {facts['source']}")
    line(words.data_line(facts))
    line()
    _print(console, ("", "BF16", "quantized", "difference (95 % interval)"), words.quality_rows(facts))
    if facts["schemes"]:
        _print(console, ("format", "modules", "median SQNR", "lowest", "where", "zero", "saturated"), words.scheme_rows(facts))
    line(words.layer_line(facts))
    _print(console, ("layer", "attention", "added", "", "accumulated"), _layer_rows(layers))
    if print_mtp is not None:
        print_mtp(console)
    else:
        line(f"MTP head: not measured: {facts['mtp_left_out']}")
    line()
    _print_outliers(facts["outliers"], line)
    if facts["gates"]:
        line()
        _print(console, ("limit", "is", "found", ""), words.gate_rows(facts))


def _print_outliers(outliers: Sequence[Mapping[str, str]], line: Callable[[str], None]) -> None:
    if not outliers:
        line("nothing stands out: no module is off, and what is not quantized is the source's")
        return
    line("one module or tensor stands out:" if len(outliers) == 1 else f"{len(outliers)} modules and tensors stand out:")
    for outlier in outliers[:SHOWN_OUTLIERS]:
        line(f"  {outlier['where']} {outlier['text']}")
    if len(outliers) > SHOWN_OUTLIERS:
        line(f"  and {len(outliers) - SHOWN_OUTLIERS} more: report.json has all")


def _layer_rows(layers: Sequence[LayerError]) -> Iterable[tuple[str, ...]]:
    """The layers that add the most error, in their order."""
    worst = sorted(layers, key=lambda layer: -layer.added if math.isfinite(layer.added) else -math.inf)[:SHOWN_LAYERS]
    scale = max((layer.added for layer in layers if math.isfinite(layer.added)), default=0.0) or 1.0
    for layer in sorted(worst, key=lambda layer: layer.index):
        kind = layer.kind.removesuffix("_attention")
        yield str(layer.index), kind, f"{layer.added:.4f}", _bar(layer.added / scale), f"{layer.accumulated:.4f}"


def _bar(share: float) -> str:
    return "█" * round(BAR * share) if math.isfinite(share) else "?" * BAR


def _print(console: Console, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    table = Table(*header, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print()
