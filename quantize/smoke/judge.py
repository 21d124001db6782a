"""The verdict: each check is a function of the evidence alone."""

from collections.abc import Callable, Iterator

from assemble.rules import Severity
from quantize.smoke import acceptance, answers, blame, loading
from quantize.smoke.evidence import Evidence
from quantize.smoke.facts import SM_120, facts_of, gpus_of
from quantize.smoke.report import FAIL, NOTE, PASS, SKIP, WARN, Check, Report

Checks = Iterator[Check]


def law_book(evidence: Evidence) -> Checks:
    """What the offline rules say, since vLLM is silent about most of it."""
    if evidence.findings is None:
        yield Check(
            "law book",
            SKIP,
            "not applied: the checkpoint is not quantized" if not evidence.expectation.quantized else "not applied",
        )
        return
    found = evidence.broken()
    errors = [f for f in found if f.severity is Severity.ERROR]
    if not found:
        yield Check(
            "law book", PASS, "every rule holds" + ("" if evidence.source_given else " (headers; --source compares content)")
        )
        return
    yield Check(
        "law book",
        FAIL if errors else WARN,
        blame.listed(errors or found),
        "every rule holds",
        (errors or found)[0].why,
        (errors or found)[0].mend,
    )


def hardware(evidence: Evidence) -> Checks:
    """Which GPU this was, and that sm_120 was not tried where it was not."""
    one = next((p for p in evidence.passes.values() if p.result.get("platform")), None)
    gpus = gpus_of(one)
    if one is None or not gpus:
        device = one.result["platform"].get("device", "unknown") if one else "unknown"
        yield Check("hardware", NOTE, f"{device}: no GPU is known to have been used; sm_120 was not tried")
        return
    name = f"{len(gpus)} x {gpus[0]['name']}, compute capability {gpus[0]['capability']}"
    tried = "" if gpus[0]["capability"] == SM_120 else "; sm_120 was not tried: its FP8 and FP8-KV kernels are others"
    yield Check("hardware", NOTE, name + tried)


LOOKS: tuple[Callable[[Evidence], Checks], ...] = (
    law_book,
    loading.loads,
    loading.resolution,
    loading.kernels,
    loading.kv_cache,
    answers.tokens,
    answers.text,
    acceptance.judge,
    answers.same_text,
    answers.likelihood,
    hardware,
)


def judge(evidence: Evidence, reached: str) -> Report:
    """Applies every check.

    Args:
        evidence: What is known.
        reached: How vLLM was reached: `python`, `image`, `endpoint` or `results`.
    """
    return Report(tuple(check for look in LOOKS for check in look(evidence)), facts_of(evidence, reached))
