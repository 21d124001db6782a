"""The benchmark's tables, for people, for a README and as JSON; and its plot."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from quantize.bench.cells import Cell, Level, knee, levels

Rows = list[list[str]]
SWEEP = ["concurrency", "total tok/s", "per stream", "mean TTFT", "mean ITL", "p99 ITL", "accept_len"]


def sweep_rows(cells: Sequence[Cell]) -> Rows:
    """One row a concurrency: means over the categories. The knee is marked."""
    sweep = levels(cells)
    at = knee(sweep)
    return [[f"{level.concurrency}{' (knee)' if level.concurrency == at else ''}", *_numbers(level)] for level in sweep]


def _numbers(level: Level) -> list[str]:
    times = [
        f"{value:,.0f} ms" if value >= 100 else f"{value:.1f} ms" for value in (level.ttft_ms, level.itl_ms, level.itl_p99_ms)
    ]
    return [f"{level.tokens_per_second:,.1f}", f"{level.per_stream:,.1f}", *times, _length(level.acceptance_length)]


def category_header(cells: Sequence[Cell]) -> list[str]:
    """The second table's head: fewest streams against most."""
    low, high = _ends(cells)
    return [
        "category",
        f"{low} stream{'' if low == 1 else 's'}",
        f"{high} streams",
        "scaling",
        "accept_len",
        f"ITL @{low}",
        f"ITL @{high}",
    ]


def category_rows(cells: Sequence[Cell]) -> Rows:
    """One row a category, the fastest with many streams first."""
    low, high = _ends(cells)
    table = {(cell.category, cell.concurrency): cell for cell in cells}
    categories = {cell.category for cell in cells}
    order = sorted(categories, key=lambda name: -table[name, high].tokens_per_second)
    rows = []
    for name in order:
        few, many = table[name, low], table[name, high]
        rows.append(
            [
                name,
                f"{few.tokens_per_second:.1f}",
                f"{many.tokens_per_second:.1f}",
                f"{many.tokens_per_second / few.tokens_per_second:.2f}x",
                _length(few.acceptance_length),
                f"{few.itl_ms:.1f}",
                f"{many.itl_ms:.1f}",
            ]
        )
    return rows


def sentence(cells: Sequence[Cell]) -> str:
    """What the knee means, in one sentence."""
    sweep = levels(cells)
    at = knee(sweep)
    if len(sweep) < 2:
        return "One concurrency alone has no knee."
    if at is None:
        return f"No knee: throughput still grows at {sweep[-1].concurrency}, the most that was tried."
    index = next(i for i, level in enumerate(sweep) if level.concurrency == at)
    here, then = sweep[index], sweep[index + 1]
    gain = then.tokens_per_second - here.tokens_per_second
    return (
        f"{at} is the knee: {then.concurrency} at once bring {gain:+.0f} tok/s more, and the first token comes after "
        f"{then.ttft_ms:,.0f} ms instead of {here.ttft_ms:,.0f} ms."
    )


def notes(cells: Sequence[Cell], output_tokens: int) -> str:
    """How it was measured."""
    counts = {cell.category: cell.completed for cell in cells}
    least, most = min(counts.values()), max(counts.values())
    prompts = f"{least} to {most}" if least < most else str(least)
    failed = sum(cell.failed for cell in cells)
    return (
        f"{len(counts)} categories, {prompts} prompts each, {output_tokens} tokens a "
        f"request (end-of-text ignored), temperature 0. ITL is the time between two arrivals; an arrival brings accept_len "
        f"tokens. Values are means over the categories." + (f" {failed} requests failed." if failed else "")
    )


def markdown(cells: Sequence[Cell], output_tokens: int) -> str:
    """Both tables as Markdown."""
    parts = [_markdown(SWEEP, sweep_rows(cells)), sentence(cells), _markdown(category_header(cells), category_rows(cells))]
    return "\n\n".join([*parts, notes(cells, output_tokens)]) + "\n"


def print_report(cells: Sequence[Cell], output_tokens: int, console: Console) -> None:
    """Both tables for a terminal."""
    for header, rows in ((SWEEP, sweep_rows(cells)), (category_header(cells), category_rows(cells))):
        table = Table(box=None, pad_edge=False)
        for number, name in enumerate(header):
            table.add_column(name, justify="left" if number == 0 else "right")
        for row in rows:
            table.add_row(*row)
        console.print(table)
        console.print("")
    console.print(sentence(cells), markup=False)
    console.print(notes(cells, output_tokens), markup=False)


def as_json(cells: Sequence[Cell], output_tokens: int) -> dict[str, Any]:
    """Everything as plain data."""
    sweep = levels(cells)
    return {
        "output_tokens": output_tokens,
        "knee": knee(sweep),
        "sweep": [level.__dict__ | {"per_stream": level.per_stream} for level in sweep],
        "cells": [cell.__dict__ for cell in cells],
    }


def plot(cells: Sequence[Cell], path: Path) -> None:
    """Throughput and latency over concurrency, the knee marked, as a PNG."""
    from matplotlib.figure import Figure

    sweep = levels(cells)
    at = knee(sweep)
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    xs = [level.concurrency for level in sweep]
    for name in dict.fromkeys(cell.category for cell in cells):
        own = sorted((c.concurrency, c.tokens_per_second) for c in cells if c.category == name)
        left.plot(*zip(*own, strict=True), color="0.75", linewidth=1)
        left.annotate(name, own[-1], fontsize=7, color="0.45", xytext=(3, -2), textcoords="offset points")
    left.plot(xs, [level.tokens_per_second for level in sweep], "o-", color="tab:green", label="mean of the categories")
    left.set(xlabel="concurrent requests", ylabel="output tokens a second", ylim=(0, None), xticks=xs)
    left.set_xlim(0, xs[-1] * 1.3)  # room for the categories' names
    for label, key, color in (
        ("TTFT, mean", "ttft_ms", "tab:blue"),
        ("ITL, 99 %", "itl_p99_ms", "tab:orange"),
        ("ITL, mean", "itl_ms", "tab:red"),
    ):
        right.plot(xs, [getattr(level, key) for level in sweep], "o-", color=color, label=label)
    right.set(xlabel="concurrent requests", ylabel="milliseconds", yscale="log", xticks=xs)
    for axes in (left, right):
        if at is not None:
            axes.axvline(at, color="0.4", linestyle=":", label=f"knee: {at}")
        axes.grid(visible=True, alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=110, metadata={"Software": ""})


def _markdown(header: list[str], rows: Rows) -> str:
    return "\n".join(["| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows)])


def _ends(cells: Sequence[Cell]) -> tuple[int, int]:
    concurrencies = {cell.concurrency for cell in cells}
    return min(concurrencies), max(concurrencies)


def _length(value: float | None) -> str:
    return f"{value:.2f}" if value is not None else "-"
