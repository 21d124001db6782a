"""What the smoke test says: checks, and the facts for the card; as text for people and as JSON."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

PASS, NOTE, WARN, FAIL, SKIP = "pass", "note", "warn", "fail", "skip"
LAW_BOOK, CUT_SHORT = "law book", "finishes"  # names of checks
STYLES = {PASS: "green", NOTE: "", WARN: "yellow", FAIL: "red", SKIP: "dim"}


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: What.
        status: `pass`, `note` (nothing to judge), `warn`, `fail`, or `skip` (could not be looked at).
        found: What was seen.
        expected: What should be.
        cause: For what is not as expected: why, as far as it is known.
        remedy: And what to do.
    """

    name: str
    status: str
    found: str
    expected: str = ""
    cause: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class Report:
    """The verdict.

    Attributes:
        checks: In the order they matter.
        facts: Plain data, for stage records and the card; see `as_json`.
    """

    checks: tuple[Check, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether nothing failed, and something was looked at."""
        return not self.failures and any(check.status == PASS for check in self.checks)

    @property
    def failures(self) -> list[Check]:
        """The checks that failed; what was cut short last, since it says the least about the checkpoint."""
        return sorted(
            (check for check in self.checks if check.status == FAIL), key=lambda check: check.name.startswith(CUT_SHORT)
        )

    @property
    def cut_short(self) -> bool:
        """Whether nothing failed but that a pass did not come to its end."""
        return bool(self.failures) and all(check.name.startswith(CUT_SHORT) for check in self.failures)

    @property
    def reason(self) -> str:
        """Why it failed, in one line: the law book first, since it names what vLLM only shows."""
        if not self.failures:
            return ""
        first, *others = self.failures
        because = first.cause or first.found
        if first.cause and first.name == LAW_BOOK:
            because = f"{first.found.split('; ')[0]}{', and more' if '; ' in first.found else ''}: {first.cause}"
        seen = dict.fromkeys(check.name.split(",")[0] for check in others if not check.name.startswith(CUT_SHORT))
        if seen:
            because += f"; seen in: {', '.join(seen)}"
        elif first.name == LAW_BOOK:
            because += "; no other check that could be made shows it"
        return f"{first.name}: {because}"

    def as_json(self) -> dict[str, Any]:
        """Verdict, facts and checks as plain data."""
        return {"passed": self.passed, "reason": self.reason, **self.facts, "checks": [check.__dict__ for check in self.checks]}


def print_report(report: Report, console: Console) -> None:
    """Prints the checks, then what is wrong and what to do about it."""
    table = Table("check", "", "found", box=None, pad_edge=False)
    for check in report.checks:
        table.add_row(
            check.name,
            f"[{STYLES[check.status]}]{check.status}[/]" if STYLES[check.status] else check.status,
            _plain(check.found),
        )
    console.print(table)
    for check in (*report.failures, *(check for check in report.checks if check.status == WARN)):
        console.print(f"\n{check.status}: {check.name}", markup=False)
        for label, text in (
            ("found", check.found),
            ("expected", check.expected),
            ("because", check.cause),
            ("do", check.remedy),
        ):
            if text:
                console.print(f"  {label:9} {text}", markup=False)


def _plain(text: str) -> str:
    return text.replace("[", r"\[")
