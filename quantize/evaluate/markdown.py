"""report.md: the evaluation for people, with its plots."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from quantize.evaluate import words

SHOWN_OUTLIERS = 40


def markdown(facts: Mapping[str, Any], plots: Sequence[str], mtp: Sequence[str]) -> str:
    """The report.

    Args:
        facts: As `Report.facts`.
        plots: Names of the PNG files beside it.
        mtp: The section about the head, line by line; [] where it was not measured.
    """
    lines = [f"# {facts['name']} against {facts['source']}", "", f"Held-out text: {words.data_line(facts)}.", ""]
    lines += ["## Predictions", "", "In brackets: 95 % bootstrap intervals over rows.", ""]
    lines += _table(("", "BF16", "quantized", "difference"), words.quality_rows(facts))
    lines += _plot(plots, "kl-histogram.png", "Divergence, token by token")
    lines += ["## What stands out", "", *_outliers(facts["outliers"])]
    header = ("format", "modules", "median SQNR", "lowest", "where", "zero blocks", "saturated blocks")
    lines += ["## Weights", "", *_table(header, words.scheme_rows(facts)), "Every module: `modules.jsonl`.", ""]
    lines += [
        "## Layers",
        "",
        f"{words.layer_line(facts)}.",
        "",
        *_plot(plots, "layer-error.png", "Error of the hidden states"),
    ]
    lines += [*mtp, ""] if mtp else ["## MTP head", "", f"Not measured: {facts['mtp_left_out']}.", ""]
    lines += _plot(plots, "acceptance.png", "Acceptance by position")
    if facts["gates"]:
        lines += ["## Limits of the recipe", "", *_table(("limit", "is", "found", ""), words.gate_rows(facts))]
    lines += [
        "## How it was measured",
        "",
        "The written files were read back and run in BF16, layer by layer, beside the source.",
        "",
    ]
    lines += ["Simulated:", "", *(f"- {text}" for text in facts["simulated"]), ""]
    lines += ["Not simulated:", "", *(f"- {text}" for text in facts["not_simulated"]), ""]
    lines += [f"Size: {facts['size_bytes']:,} bytes of tensors. Device: {facts['device']}.", ""]
    return "\n".join(lines)


def _outliers(outliers: Sequence[Mapping[str, str]]) -> list[str]:
    if not outliers:
        return ["Nothing: every module is as close to the source as its format allows, and all else is the source's.", ""]
    lines = [f"- **{o['where']}** {o['text']}" for o in outliers[:SHOWN_OUTLIERS]]
    if len(outliers) > SHOWN_OUTLIERS:
        lines.append(f"- and {len(outliers) - SHOWN_OUTLIERS} more, in `report.json`")
    return [*lines, ""]


def _plot(plots: Sequence[str], name: str, title: str) -> list[str]:
    return [f"![{title}]({name})", ""] if name in plots else []


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [_row(header), "|" + "---|" * len(header), *(_row(row) for row in rows), ""]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
