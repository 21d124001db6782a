"""What the card has to own up to: everything that was not measured or tried, drawn from the records that are not there."""

from collections.abc import Mapping
from typing import Any


def limits(facts: Mapping[str, Any]) -> list[str]:
    """A sentence for each thing a reader might take for granted, and that no record backs."""
    evaluate, smoke = facts.get("evaluate"), facts.get("smoke")
    if facts.get("mended"):
        said = ["Mended after it was made: what was evaluated or served before then does not speak of it."]
        return [*said, *_origin(facts), *_quality(evaluate, facts), *_serving(smoke, facts)]
    return [*_origin(facts), *_quality(evaluate, facts), *_serving(smoke, facts)]


def _origin(facts: Mapping[str, Any]) -> list[str]:
    if not facts.get("model"):
        return ["Source, recipe and calibration: not recorded, so that it is what its name says was not checked."]
    if facts["model"]["revision"] is None:
        return ["The source is a local directory: it has a hash, and no public address."]
    return []


def _quality(evaluate: Mapping[str, Any] | None, facts: Mapping[str, Any]) -> list[str]:
    said = []
    if evaluate is None:
        said.append("Quality against the BF16 model, and draft acceptance: not evaluated.")
    else:
        said.append("The evaluation computes with the written weights in BF16 and simulates what vLLM rounds.")
        said += [f"Not simulated: {what}." for what in evaluate.get("not_simulated", [])]
        if evaluate["data"].get("calibration") == "unknown":
            said.append("Whether the evaluation's text overlaps the calibration's is not known.")
        if not evaluate.get("mtp"):
            said.append("Draft acceptance: not measured in the evaluation.")
    said.append("Benchmarks (question answering, mathematics, code, long context): not run.")
    if not facts["plan"]["text_only"]:
        said.append("Images and video: the vision tower is copied, and was not tried.")
    return said


def _serving(smoke: Mapping[str, Any] | None, facts: Mapping[str, Any]) -> list[str]:
    said = []
    if smoke is None:
        said.append("Loading and generating in vLLM: no smoke test was run, on any hardware.")
    else:
        names = ", ".join(gpu["name"] for gpu in smoke.get("gpus") or []) or "one server"
        said.append(f"Served on {names} only; other GPUs, and other versions of vLLM, were not tried.")
        if smoke.get("sm_120") == "not tried":
            said.append("Consumer Blackwell cards (compute capability 12.0) were not tried.")
    if facts.get("serve"):
        said.append("Contexts and concurrency in the serve commands are computed from headers, not measured.")
    said.append("Speed was not measured.")
    return said
