"""How numbers look in the card, and the table of what is stored."""

from collections.abc import Mapping
from typing import Any

from assemble.formats import FP8, W4A16_NVFP4

WHAT = {
    W4A16_NVFP4: ("MLP, `lm_head`", "NVFP4, W4A16, blocks of 16"),
    FP8: ("attention, linear attention", "FP8 E4M3, W8A8, a scale a tensor"),
    "MTP head": ("MTP head", "BF16, as in the source"),
    "other": ("embedding, norms, small projections, vision tower", "as in the source"),
}
MOE_WHAT = ("routed and shared experts, `lm_head`", WHAT[W4A16_NVFP4][1])


def size_rows(sizes: Mapping[str, Mapping[str, int]], *, moe: bool) -> list[dict[str, Any]]:
    """A row for each kind of tensor that is there."""
    names = WHAT | ({W4A16_NVFP4: MOE_WHAT} if moe else {})
    total = sum(kind["bytes"] for kind in sizes.values())
    return [
        {"what": what, "format": form, **sizes[kind], "share": sizes[kind]["bytes"] / total if total else 0.0}
        for kind, (what, form) in names.items()
        if kind in sizes
    ]


def gigabytes(nbytes: int) -> str:
    """`22.09 GB`, `8.4 MB` (powers of 1000)."""
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.1f} MB"


def number(value: float) -> str:
    """Four digits that count: `0.003124`, `12.35`."""
    return f"{value:.4g}" if abs(value) < 10_000 else f"{value:,.0f}"


def share(value: float) -> str:
    """`97.3 %`."""
    return f"{100 * value:.1f} %"


def estimate(value: Mapping[str, float], unit: str = "") -> str:
    """A value with its interval: `0.0312 (0.0298 to 0.0327)`."""
    show = share if unit == "%" else number
    return f"{show(value['value'])} ({show(value['low'])} to {show(value['high'])})"
