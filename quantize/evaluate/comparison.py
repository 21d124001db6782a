"""Several checkpoints of one source, side by side: what they weigh, how close they come, how well their heads draft."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from assemble.jsonfile import write_object
from quantize.evaluate import plots
from quantize.evaluate.distance import Estimate, difference
from quantize.evaluate.report import Report

STEPS = ("tokens a step, K=2", "K=4")
HEADER = ("checkpoint", "size", "mean KL", "above the first", "p99 KL", "NLL", "same first choice", *STEPS, "stand out")
JSON, MARKDOWN, PLOT = "comparison.json", "comparison.md", "pareto.png"


def names(roots: Sequence[Path]) -> list[str]:
    """A name for each: the directory's, with as much of its path as tells them apart."""
    depth = 1
    while len({root.parts[-depth:] for root in roots}) < len(set(roots)):
        depth += 1
    return ["/".join(root.parts[-depth:]) for root in roots]


def rows(reports: Sequence[Report]) -> Iterator[tuple[str, ...]]:
    """The table's rows, the smallest divergence first."""
    ordered = sorted(reports, key=lambda r: r.quality["kl_mean"].value)
    for report in ordered:
        q, above = report.quality, difference(report.walked.scores, ordered[0].walked.scores)
        steps = [report.tokens_per_step(k) for k in (2, 4)]
        yield (
            report.name,
            f"{report.size_bytes / 1e6:,.1f} MB" if report.size_bytes < 1e9 else f"{report.size_bytes / 1e9:.2f} GB",
            _with_half(q["kl_mean"], ".5f"),
            "" if report is ordered[0] else _with_half(above, "+.5f"),
            f"{q['kl_p99'].value:.4f}",
            f"{q['nll_increase'].value:+.4f}",
            f"{q['top1_agreement'].value:.2%}",
            *("" if step is None else f"{step:.2f}" for step in steps),
            str(len(report.outliers)),
        )


def _with_half(estimate: Estimate, form: str) -> str:
    return f"{estimate.value:{form}} ± {(estimate.high - estimate.low) / 2:.5f}"


def write_comparison(reports: Sequence[Report], out: Path) -> list[str]:
    """Writes comparison.json, comparison.md and pareto.png; returns their names."""
    points = [(r.name, r.size_bytes, r.quality["kl_mean"].value) for r in reports]
    plots.pareto([*points, (reports[0].source, reports[0].source_bytes, 0.0)], out / PLOT)
    lines = [
        f"# Checkpoints of {reports[0].source}",
        "",
        "The smallest divergence first; ± is half the 95 % interval over rows, of the difference where it is one.",
        "",
    ]
    lines += ["| " + " | ".join(HEADER) + " |", "|" + "---|" * len(HEADER)]
    lines += ["| " + " | ".join(row) + " |" for row in rows(reports)]
    lines += ["", f"![Size against divergence]({PLOT})", ""]
    (out / MARKDOWN).write_text("\n".join(lines), encoding="utf-8")
    write_object(out / JSON, as_json(reports))
    return [PLOT, MARKDOWN, JSON]


def as_json(reports: Sequence[Report]) -> dict[str, Any]:
    """Plain data: each report's facts."""
    return {"checkpoints": [report.facts() for report in reports]}


def print_comparison(reports: Sequence[Report], console: Console) -> None:
    """The table in the terminal."""
    table = Table(*HEADER, box=None, pad_edge=False)
    for row in rows(reports):
        table.add_row(*row)
    console.print(table)
