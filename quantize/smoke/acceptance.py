"""Are drafts accepted? From vLLM's own counters: throughput and text cannot tell a working head from a dead one."""

from collections.abc import Iterator
from typing import Any

from quantize.smoke import blame
from quantize.smoke.evidence import Evidence
from quantize.smoke.passes import Pass
from quantize.smoke.report import FAIL, PASS, WARN, Check

ENOUGH = 100  # drafts: with fewer, a share is too rough to be compared with a prediction


def judge(evidence: Evidence) -> Iterator[Check]:
    """Checks the pass with the head, and the one with CUDA graphs where there is one."""
    for one in (evidence.drafted, evidence.graphs):
        if one is not None and one.outputs:
            name = "acceptance" if one is evidence.drafted else f"acceptance, {one.name}"
            yield _judged(name, one, evidence)


def facts(evidence: Evidence) -> dict[str, Any] | None:
    """What the card says about it; None when drafts were not counted."""
    one = evidence.drafted
    counted = _counted(one) if one else None
    if counted is None:
        return None
    return counted | {
        "floor": evidence.recipe.min_acceptance_percent / 100,
        "predicted_tokens_per_step": evidence.prediction.tokens_per_step,
    }


def _counted(one: Pass) -> dict[str, Any] | None:
    counters = one.result.get("speculation")
    if not counters:
        return None
    drafts, drafted, accepted = (int(counters[key]) for key in ("drafts", "draft_tokens", "accepted_tokens"))
    by_position = [int(n) for n in counters["accepted_by_position"]]
    return {
        "num_speculative_tokens": len(by_position) or (round(drafted / drafts) if drafts else 0),
        "drafts": drafts,
        "drafted": drafted,
        "accepted": accepted,
        "rate": accepted / drafted if drafted else None,
        "by_position": [n / drafts for n in by_position] if drafts else [],
        "tokens_per_step": 1 + accepted / drafts if drafts else None,
    }


def _judged(name: str, one: Pass, evidence: Evidence) -> Check:
    counted = _counted(one)
    if counted is None:
        text = "vLLM counted no drafts: it was started without speculation"
        return Check(name, FAIL, text, "drafts", "", _start_with(evidence))
    if not counted["drafted"]:
        return Check(name, FAIL, "nothing was drafted", "drafts", *blame.for_no_drafts(evidence))
    found = _words(counted)
    predicted = evidence.prediction.tokens_per_step
    if predicted is not None and counted["num_speculative_tokens"] == evidence.recipe.num_speculative_tokens:
        return _against_prediction(name, counted, found, predicted, evidence)
    floor = evidence.recipe.min_acceptance_percent / 100
    first = counted["by_position"][0] if counted["by_position"] else counted["rate"]
    good = first >= floor
    return Check(
        name,
        PASS if good else FAIL,
        found,
        f"at least {floor:.0%} of the first drafted token",
        *(() if good else blame.for_no_drafts(evidence)),
    )


def _against_prediction(name: str, counted: dict[str, Any], found: str, predicted: float, evidence: Evidence) -> Check:
    share = evidence.recipe.min_of_predicted_percent / 100
    floor = 1 + (predicted - 1) * share
    found = f"{found}; predicted {predicted:.2f}"
    expected = f"at least {floor:.2f} tokens a step"
    if counted["tokens_per_step"] >= floor:
        return Check(name, PASS, found, expected)
    few = counted["drafts"] < ENOUGH and counted["accepted"]
    return Check(name, WARN if few else FAIL, found, expected, *blame.for_no_drafts(evidence))


def _words(counted: dict[str, Any]) -> str:
    positions = " ".join(f"{share:.0%}" for share in counted["by_position"])
    return (
        f"{counted['accepted']} of {counted['drafted']} drafted tokens ({counted['rate']:.1%}; by position {positions}), "
        f"{counted['tokens_per_step']:.2f} tokens a step"
    )


def _start_with(evidence: Evidence) -> str:
    k = evidence.recipe.num_speculative_tokens
    return f'start it with --speculative-config \'{{"method": "mtp", "num_speculative_tokens": {k}}}\''
