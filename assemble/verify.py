"""Verifies a checkpoint against the law book, and says what is wrong with it."""

import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assemble.architecture import ConfigError
from assemble.checkpoint import Checkpoint
from assemble.reader import Reader
from assemble.rules import Detail, Finding, Needs, Rule, Severity, Subject
from assemble.rules.book import RULES
from assemble.rules.reading import read_subject
from assemble.rules.versions import Requirements, requirements

_TEXT_LIMIT = 400  # characters of a name or value that a finding quotes
_NUMBERED = re.compile(r"\b(layers|experts|blocks)\.\d+")
_ORDER = {Severity.ERROR: 0, Severity.WARNING: 1, Severity.INFO: 2}


@dataclass(frozen=True)
class Group:
    """Findings of one rule whose names differ in layer and expert numbers only.

    Attributes:
        where: Their name, with `*` for the numbers that differ.
        findings: All of them, in order.
    """

    where: str
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class Report:
    """What a verification found.

    Attributes:
        root: The checkpoint.
        rules: Ids of the rules that were applied.
        findings: Every violation, errors first.
        requires: What it takes to serve the checkpoint.
    """

    root: Path
    rules: tuple[str, ...]
    findings: tuple[Finding, ...]
    requires: Requirements

    @property
    def errors(self) -> list[Finding]:
        """The findings that make a checkpoint unfit to serve."""
        return [f for f in self.findings if f.severity is Severity.ERROR]

    @property
    def warnings(self) -> list[Finding]:
        """The findings that leave it fit to serve, but not as it should be."""
        return [f for f in self.findings if f.severity is Severity.WARNING]

    @property
    def groups(self) -> list[Group]:
        """The findings, folded for reading: 10,240 broken experts are one group."""
        folded: dict[tuple[str, ...], list[Finding]] = {}
        for f in self.findings:
            name = _NUMBERED.sub(r"\1.*", f.where)
            folded.setdefault((f.rule, f.severity.value, name, f.served.value, f.mend), []).append(f)
        return [Group(key[2] if len(found) > 1 else found[0].where, tuple(found)) for key, found in folded.items()]

    def as_json(self) -> dict[str, Any]:
        """The report as plain data, with every finding."""
        findings = [
            {
                "rule": f.rule,
                "severity": f.severity.value,
                "where": f.where,
                "found": f.found,
                "expected": f.expected,
                "served": f.served.value,
                "why": f.why,
                "mend": f.mend,
            }
            for f in self.findings
        ]
        return {
            "ok": not self.errors,
            "checkpoint": str(self.root),
            "rules": list(self.rules),
            "requires": self.requires.as_json(),
            "findings": findings,
        }


def verify(
    root: Path,
    *,
    source: Checkpoint | None = None,
    head: Checkpoint | None = None,
    deep: bool = False,
    tensor_parallel: int = 1,
    require_mtp: bool = False,
    reader: Reader | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> Report:
    """Applies every rule that what is given allows.

    Args:
        root: The checkpoint's directory.
        source: The BF16 checkpoint it was made from: adds the rules of identity.
        head: Where its MTP head was taken from, when not from `source`.
        deep: Also read tensor values.
        tensor_parallel: The number of GPUs it is to be split over.
        require_mtp: Make the absence of an MTP head an error.
        reader: Reads the few values that rules about headers need; by default from `root`.
        progress: Called with the bytes of values read.
    """
    subject = read_subject(root, source, head, deep, tensor_parallel, require_mtp, reader, progress)
    wanted = {Needs.FILES, Needs.HEADERS}
    if isinstance(subject.known, ConfigError):
        wanted = {Needs.FILES}
    else:
        wanted |= ({Needs.VALUES} if deep else set()) | ({Needs.SOURCE} if source else set())
    rules = [rule for rule in RULES if rule.needs in wanted]
    findings = sorted((f for rule in rules for f in apply_rule(rule, subject)), key=lambda f: _ORDER[f.severity])
    return Report(root, tuple(rule.id for rule in rules), tuple(findings), requirements(subject))


def apply_rule(rule: Rule, subject: Subject) -> list[Finding]:
    """The rule's findings. A file that cannot be read any more while a rule reads it is a finding of that rule."""
    try:
        return _findings(rule, subject, rule.check(subject))
    except OSError as error:
        where = str(error.filename or subject.root)
        return _findings(rule, subject, [Detail(where, f"cannot be read: {error.strerror}", "a readable file", Severity.ERROR)])


def _findings(rule: Rule, subject: Subject, details: Iterable[Detail]) -> list[Finding]:
    places = {"CHECKPOINT": shlex.quote(str(subject.root))}
    if subject.source:
        places["BF16"] = shlex.quote(str(subject.source.root))
    return [
        Finding(
            rule.id,
            d.severity or rule.severity,
            _plain(d.where),
            _plain(d.found),
            _plain(d.expected),
            d.served or rule.served,
            rule.why,
            _command((d.mend or rule.mend).value, places),
        )
        for d in details
    ]


def _command(text: str, places: Mapping[str, str]) -> str:
    return " ".join(places.get(word, word) for word in text.split(" "))


def _plain(text: str) -> str:
    """Text from a file, made fit for a terminal and for JSON: no control characters, no lone surrogates, not endless."""
    if len(text) > _TEXT_LIMIT:
        text = text[:_TEXT_LIMIT] + "…"
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
