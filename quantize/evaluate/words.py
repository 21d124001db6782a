"""The numbers of a report in words, for the terminal and for Markdown alike."""

from collections.abc import Iterator, Mapping
from typing import Any

SCHEMES = {"W4A16_NVFP4": "NVFP4 W4A16", "NVFP4": "NVFP4 W4A4", "FP8": "FP8 W8A8"}
CALIBRATION = {
    "disjoint": "none of it was calibrated on (compared with the calibration rows)",
    "unknown": "whether it was calibrated on is not known: the calibration rows are not beside the checkpoint",
    "excluded": "rows that were calibrated on are left out",
}


def data_line(facts: Mapping[str, Any]) -> str:
    """What text it was measured on."""
    data = facts["data"]
    excluded = f" ({data['excluded_rows']})" if data["excluded_rows"] else ""
    if data["similar_rows"]:
        excluded += f"; rows with more than half of their text in common with the calibration rows: {data['similar_rows']}"
    return (
        f"{data['name']}: {data['rows']} rows of {data['tokens_per_row']} tokens at most, {data['scored_tokens']:,} scored; "
        f"{CALIBRATION[data['calibration']]}{excluded}"
    )


def quality_rows(facts: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """What, BF16, quantized, difference or value with its interval."""
    q = facts["quality"]
    yield "NLL, nats a token", _number(q["nll_bf16"]), _number(q["nll_quantized"]), _interval(q["nll_increase"], "+.4f")
    before, after = q["perplexity_bf16"]["value"], q["perplexity_quantized"]["value"]
    factor = "not finite" if None in (before, after) else f"{after / before - 1:+.2%}"
    yield "perplexity", _number(q["perplexity_bf16"], ".3f"), _number(q["perplexity_quantized"], ".3f"), factor
    yield "KL(BF16 || quantized), mean", "", "", _interval(q["kl_mean"], ".5f")
    yield "KL, 99th percentile of tokens", "", "", _interval(q["kl_p99"], ".4f")
    yield "same first choice", "", "", _interval(q["top1_agreement"], ".2%")


def scheme_rows(facts: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Scheme, modules, median and lowest SQNR, where, zero and saturated blocks."""
    for s in facts["schemes"]:
        yield (
            SCHEMES.get(s["scheme"], s["scheme"]),
            f"{s['modules']:,}",
            decibels(s["sqnr_db_median"]),
            decibels(s["sqnr_db_lowest"]),
            short(s["lowest"]),
            f"{s['zero']:.2%}",
            f"{s['saturated']:.2%}",
        )


def layer_line(facts: Mapping[str, Any]) -> str:
    """The layers in a sentence."""
    layers = facts["layers"]
    added, accumulated = (
        "not finite" if value is None else f"{value:.3f} of the hidden state"
        for value in (layers["largest_added"], layers["accumulated_at_end"])
    )
    return (
        f"{layers['count']} decoder layers: the most error is added by layer {layers['largest_added_layer']} ({added}); "
        f"accumulated at the end: {accumulated}"
    )


def gate_rows(facts: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """Gate, limit, found, verdict."""
    for gate in facts["gates"]:
        found = "not measured" if gate["found"] is None else f"{gate['found']:.4g}"
        yield gate["name"], f"{gate['limit']:g}", found, "kept" if gate["passed"] else "NOT KEPT"


def short(module: str) -> str:
    """A module's name without what all have in front."""
    return module.removeprefix("model.language_model.").removeprefix("model.")


def decibels(value: float | None) -> str:
    """`20.4 dB`."""
    return "not finite" if value is None else f"{value:.1f} dB"


def _number(estimate: Mapping[str, float | None], form: str = ".4f") -> str:
    value = estimate["value"]
    return "not finite" if value is None else format(value, form)


def _interval(estimate: Mapping[str, float | None], form: str) -> str:
    value, low, high = estimate["value"], estimate["low"], estimate["high"]
    if value is None or low is None or high is None:
        return "not finite"
    return f"{value:{form}} ({low:{form}} to {high:{form}})"
