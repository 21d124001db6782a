"""From a silent failure back to the law book: which rules, when broken, look like this from outside."""

from collections.abc import Sequence

from assemble.rules import Finding
from quantize.smoke.evidence import Evidence

NO_DRAFTS = ("IDX-1", "IDX-2", "CFG-4", "CFG-5", "MTP-1", "MTP-2", "MTP-3", "MTP-3b", "MTP-4", "Q-4", "Q-17", "VAL-3")
GARBAGE = (
    "Q-1", "Q-2", "Q-3", "Q-5", "Q-6", "Q-8", "Q-9", "Q-10", "Q-11", "Q-13", "Q-13b", "CFG-3", "CFG-12", "IDX-1", "IDX-2",
    "VAL-1", "VAL-2", "VAL-3", "VAL-4", "VAL-5", "VAL-6",
)  # fmt: skip
LISTED = 3  # findings that are quoted; the whole report has them all


def listed(findings: Sequence[Finding]) -> str:
    """Findings as one line, one of each rule first."""
    first = {f.rule: f for f in reversed(findings)}
    order = [f for f in findings if first[f.rule] is f]
    shown = "; ".join(f"{f.rule}: {f.where}: found {f.found}, expected {f.expected}" for f in order[:LISTED])
    more = len(findings) - min(len(order), LISTED)
    return shown + (f"; and {more} more" if more else "")


def named(findings: Sequence[Finding]) -> str:
    """Findings in a few words, for what the check of the law book lists in full."""
    rules = list(dict.fromkeys(f.rule for f in findings))
    more = len(findings) - 1
    return f"law book: {', '.join(rules)}: {findings[0].where}" + (f" and {more} more" if more else "")


def for_rules(evidence: Evidence, rules: Sequence[str], otherwise: str) -> tuple[str, str]:
    """Cause and remedy: the first broken one of some rules, else a text."""
    found = evidence.broken(*rules)
    if found:
        return f"{found[0].why} ({named(found)})", found[0].mend
    return otherwise, "python -m assemble verify CHECKPOINT --deep"


def for_no_drafts(evidence: Evidence) -> tuple[str, str]:
    """Why drafts are not accepted."""
    found = evidence.broken(*NO_DRAFTS)
    if found:
        return f"{found[0].why} ({named(found)})", found[0].mend
    body = evidence.broken(*GARBAGE)
    if body:
        return f"the body is not the model that the head drafts for: {body[0].why} ({named(body)})", body[0].mend
    if not evidence.source_given:
        return (
            "the head is there and has its shapes, so its content is wrong, or the body it drafts for is",
            "compare it with the model it came from: python -m assemble verify CHECKPOINT --deep --source BF16 (rule MTP-3)",
        )
    return (
        "head and body are the source's, so the source's own head drafts this badly, or this vLLM runs it wrong",
        "run the smoke test on the source, and on another vLLM release",
    )


def for_garbage(evidence: Evidence) -> tuple[str, str]:
    """Why the text is garbage, or the numbers are none."""
    found = evidence.broken(*GARBAGE)
    if found:
        return f"{found[0].why} ({named(found)})", found[0].mend
    if evidence.findings is None:
        return "the checkpoint is not quantized: look at the source", "run the smoke test on another vLLM release"
    return (
        "the law book finds nothing wrong, so a kernel of this vLLM on this GPU is suspected"
        + ("" if evidence.source_given else ", or content that only the source can show to be wrong"),
        "python -m assemble verify CHECKPOINT --deep --source BF16; then another vLLM release or backend",
    )
