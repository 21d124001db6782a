"""The plots of a report. The same numbers give the same bytes."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quantize.evaluate.walk import LayerError

BLUE, ORANGE, GREY, GREEN = "#2b6cb0", "#dd6b20", "#718096", "#2f855a"
SIZE = (8.0, 3.6)  # inches, at 110 dots an inch


def layer_error(layers: Sequence[LayerError], path: Path) -> None:
    """The error that each layer adds, and the error of the hidden states up to it."""
    figure, axes = _figure()
    numbers = [layer.index for layer in layers]
    colours = [ORANGE if layer.kind == "full_attention" else BLUE for layer in layers]
    axes.bar(numbers, [layer.added for layer in layers], color=colours, width=0.8)
    axes.plot(numbers, [layer.accumulated for layer in layers], color="black", marker="o", markersize=3, linewidth=1.2)
    axes.set(xlabel="decoder layer", ylabel="error / hidden state", title="Error of the hidden states")
    axes.set_ylim(bottom=0)
    _whole_numbers(axes.xaxis)
    axes.legend(
        handles=[
            _patch(BLUE, "added by a linear-attention layer"),
            _patch(ORANGE, "added by a full-attention layer"),
            _line("black", "accumulated"),
        ],
        frameon=False,
        fontsize=8,
        loc="upper left",
        bbox_to_anchor=(1.0, 1.0),
    )
    _save(figure, path)


def kl_histogram(histogram: Mapping[str, Any], mean: float, p99: float, path: Path) -> None:
    """How the divergence is spread over tokens."""
    figure, axes = _figure()
    edges, counts = histogram["edges"], histogram["tokens"]
    widths = [b - a for a, b in itertools.pairwise(edges)]
    axes.bar(edges[:-1], counts, width=widths, align="edge", color=BLUE, edgecolor="white", linewidth=0.3)
    axes.set_xscale("log")
    filled = [i for i, count in enumerate(counts) if count] or [0, len(counts) - 2]
    axes.set_xlim(edges[max(0, filled[0] - 1)], edges[min(len(counts), filled[-1] + 2)])
    axes.set(xlabel="KL(BF16 || quantized) of a token's prediction, nats", ylabel="tokens", title="Divergence, token by token")
    for value, word, colour in ((mean, "mean", ORANGE), (p99, "99 %", GREY)):
        if value > 0:  # not zero, and not NaN
            axes.axvline(value, color=colour, linestyle="--", linewidth=1.2, label=f"{word}: {value:.3g}")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=9)
    _save(figure, path)


def acceptance(mtp: Mapping[str, Any], path: Path) -> None:
    """The share of steps that accept the draft at each position, and tokens a step for each number of drafts."""
    figure, axes = _figure(2)
    names = {"bf16": ("BF16 body", GREY), "quantized": ("quantized body", BLUE)}
    for name, body in mtp["bodies"].items():
        label, colour = names.get(name, (name, GREEN))
        deepest = max(body["acceptance"], key=int)
        rates = body["acceptance"][deepest]
        axes[0].plot(range(1, len(rates) + 1), rates, marker="o", color=colour, label=label)
        steps = sorted(body["tokens_per_step"], key=int)
        axes[1].plot(
            [int(k) for k in steps], [body["tokens_per_step"][k] for k in steps], marker="o", color=colour, label=label
        )
    axes[0].set(
        xlabel="position of the draft", ylabel="share of steps that accept it", title="Acceptance by position", ylim=(0, 1)
    )
    axes[1].set(xlabel="drafts a step (K)", ylabel="tokens a step", title="What a step yields")
    axes[1].set_ylim(bottom=1)
    for each in axes:
        _whole_numbers(each.xaxis)
        each.legend(frameon=False, fontsize=9)
    _save(figure, path)


def pareto(points: Sequence[tuple[str, float, float]], path: Path) -> None:
    """Size against divergence, for several checkpoints of one source.

    Args:
        points: Name, bytes, and mean KL of each.
        path: The PNG to write.
    """
    figure, axes = _figure()
    unit, divisor = ("GB", 1e9) if max(p[1] for p in points) >= 1e9 else ("MB", 1e6)
    points = [(name, nbytes / divisor, kl) for name, nbytes, kl in points]
    best = [p for p in points if not any(q != p and q[1] <= p[1] and q[2] <= p[2] for q in points)]
    front = sorted(best, key=lambda p: p[1])
    axes.plot([p[1] for p in front], [p[2] for p in front], color=GREY, linestyle="--", linewidth=1, zorder=1)
    for name, size, kl in points:
        on_front = (name, size, kl) in front
        axes.scatter([size], [kl], color=BLUE if on_front else GREY, zorder=2)
        axes.annotate(name, (size, kl), xytext=(6, 4), textcoords="offset points", fontsize=8)
    axes.set(
        xlabel=f"tensors, {unit}",
        ylabel="mean KL(BF16 || quantized), nats",
        title="Size against divergence (lower left is better)",
    )
    axes.margins(x=0.25, y=0.2)
    axes.set_ylim(bottom=0, top=1.15 * max(p[2] for p in points) or 1.0)
    _save(figure, path)


def _figure(columns: int = 1) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE, dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, columns)
    for each in axes if columns > 1 else [axes]:
        each.spines[["top", "right"]].set_visible(False)
        each.grid(axis="y", color="#e2e8f0", linewidth=0.6)
        each.set_axisbelow(True)
    return figure, axes


def _whole_numbers(axis: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True))


def _patch(colour: str, label: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=colour, label=label)


def _line(colour: str, label: str) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], color=colour, marker="o", markersize=3, label=label)


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, metadata={"Software": None})
