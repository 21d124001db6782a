"""Verifies a checkpoint against the law book, and says what is wrong with it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assemble.architecture import ConfigError, read_architecture
from assemble.checkpoint import Checkpoint, read_layout
from assemble.jsonfile import JSONFileError, read_object
from assemble.rules import RULES, Finding, Needs, Severity, Subject


@dataclass(frozen=True)
class Report:
    """What a verification found.

    Attributes:
        root: The checkpoint.
        rules: Ids of the rules that were applied.
        findings: Every violation.
    """

    root: Path
    rules: tuple[str, ...]
    findings: tuple[Finding, ...]

    @property
    def errors(self) -> list[Finding]:
        """The findings that make a checkpoint unfit to serve."""
        return [f for f in self.findings if f.severity is Severity.ERROR]

    def as_json(self) -> dict[str, Any]:
        """The report as plain data."""
        findings = [
            {"rule": f.rule, "severity": f.severity.value, "where": f.where, "found": f.found, "expected": f.expected}
            for f in self.findings
        ]
        return {"ok": not self.errors, "rules": list(self.rules), "findings": findings}


def verify(
    root: Path,
    *,
    source: Checkpoint | None = None,
    head: Checkpoint | None = None,
    deep: bool = False,
    progress: Callable[[int], None] = lambda _: None,
) -> Report:
    """Applies every rule that what is given allows.

    Args:
        root: The checkpoint's directory.
        source: The BF16 checkpoint it was made from: adds the rules of identity.
        head: Where its MTP head was taken from, when not from `source`.
        deep: Also read tensor values.
        progress: Called with the bytes read by rules that read values.
    """
    subject, findings = _subject(root, source, head, progress)
    if subject is None:
        return Report(root, ("CFG-1",), findings)
    wanted = {Needs.HEADERS} | ({Needs.VALUES} if deep else set()) | ({Needs.SOURCE} if source else set())
    rules = [rule for rule in RULES if rule.needs in wanted]
    results = list(findings)
    for rule in rules:
        results += [Finding(rule.id, rule.severity, *detail) for detail in rule.check(subject)]
    return Report(root, ("CFG-1", *(rule.id for rule in rules)), tuple(results))


def _subject(
    root: Path, source: Checkpoint | None, head: Checkpoint | None, progress: Callable[[int], None]
) -> tuple[Subject | None, tuple[Finding, ...]]:
    """Reads the checkpoint; CFG-1 (a config.json of this family) is what every other rule stands on."""
    try:
        config = read_object(root / "config.json")
        layout = read_layout(root)
        tensors = {t.name: t for s in layout.shards for t in s.tensors}
        architecture = read_architecture(config, tensors)
    except (JSONFileError, ConfigError) as error:
        return None, (Finding("CFG-1", Severity.ERROR, "config.json", str(error), "a config of this family"),)
    twin = root / "hf_quant_config.json"
    try:
        hf_quant_config = read_object(twin) if twin.is_file() else None
    except JSONFileError as error:
        found = (Finding("CFG-7", Severity.ERROR, twin.name, str(error), "JSON"),)
        return Subject(layout, tensors, config, None, architecture, source, head, progress), found
    return Subject(layout, tensors, config, hf_quant_config, architecture, source, head, progress), ()
