"""Why vLLM did not start, or did not end: known messages (failures.yaml), what causes them, and what to do."""

import re
import textwrap
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from quantize.smoke import logs
from quantize.smoke.passes import End, Pass
from recipes.yaml_text import read_mapping

TABLE = Path(__file__).parent / "failures.yaml"


class Kind(StrEnum):
    """Whose fault it is."""

    MEMORY = "out of memory"
    NO_GPU = "no GPU"
    UNSUPPORTED_GPU = "this device is not supported"
    VERSION = "this vLLM cannot"
    CHECKPOINT = "the checkpoint is at fault"
    SETTINGS = "the settings are at fault"
    ENVIRONMENT = "the environment is at fault"
    TIMEOUT = "took too long"
    KILLED = "was killed"
    UNFINISHED = "cut short"
    UNKNOWN = "not a known failure"


@dataclass(frozen=True)
class Failure:
    """A known message.

    Attributes:
        kind: Whose fault it is.
        pattern: Regular expression that its line matches.
        cause: What it means for this kind of checkpoint.
        remedy: What to do.
        source: File, symbol and version that prints it, or a public report.
        rules: Rules of the law book that find it without a GPU.
    """

    kind: Kind
    pattern: str
    cause: str
    remedy: str
    source: str
    rules: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sign:
    """A message of a vLLM that did start.

    Attributes:
        pattern: Regular expression that its line matches.
        meaning: What it says about the checkpoint.
        source: As for `Failure`.
        rules: As for `Failure`.
    """

    pattern: str
    meaning: str
    source: str
    rules: tuple[str, ...] = ()


def _table() -> tuple[tuple[Failure, ...], tuple[Sign, ...], tuple[Sign, ...]]:
    _, data = read_mapping(TABLE, "table", ValueError)
    failures = tuple(Failure(Kind[row.pop("kind")], rules=tuple(row.pop("rules", ())), **row) for row in data["failures"])
    warnings, expected = (
        tuple(Sign(rules=tuple(row.pop("rules", ())), **row) for row in data[part]) for part in ("warnings", "expected")
    )
    return failures, warnings, expected


FAILURES, WARNINGS, EXPECTED = _table()


@dataclass(frozen=True)
class Explanation:
    """What became of a pass that did not finish.

    Attributes:
        kind: Whose fault it is.
        message: The line that says so, as it was printed.
        cause: What that means.
        remedy: What to do.
        source: Where the message was read.
        rules: Rules of the law book that find it without a GPU.
    """

    kind: Kind
    message: str
    cause: str
    remedy: str
    source: str = ""
    rules: tuple[str, ...] = ()


def explain(failed: Pass) -> Explanation:
    """Why a pass did not finish. What it said itself comes first, then its log, then how it ended."""
    error = failed.result.get("error") or {}
    # Warnings stand in every log, and some sound like failures: they explain nothing.
    for text in (failed.error, str(error.get("traceback", "")), logs.without_chatter(failed.log)):
        found = _find(text)
        if found is not None:
            return found
    if failed.end is End.TIMEOUT:
        doing = {"import": "importing vLLM", "load": "loading", "start": "starting"}.get(failed.phase, failed.phase)
        return Explanation(
            Kind.TIMEOUT,
            failed.detail,
            f"it was {doing} when the time was up; a first start on a machine tunes kernels for minutes",
            "give it longer (--timeout), and look at the end of the log",
        )
    said = failed.error or logs.last_error(failed.log)
    if said and "SIG" not in failed.detail:
        return Explanation(Kind.UNKNOWN, said, f"vLLM stopped in phase {failed.phase!r}", "look at the log above this line")
    if failed.end is End.DIED:
        return Explanation(Kind.KILLED, failed.detail, *_death(failed))
    return _unfinished(failed)


def _unfinished(failed: Pass) -> Explanation:
    """A result that was brought here without an answer, and whose log holds no error."""
    line = _last_line(failed.log)
    seconds = max(sum(failed.result.get("seconds", {}).values()), logs.span(failed.log))
    return Explanation(
        Kind.UNFINISHED,
        f"it ended without an answer{f' after {seconds:.0f} s or more' if seconds else ''}, in phase {failed.phase!r}; "
        + (f"last line: {line}" if line else "its log is empty"),
        "it was ended from outside, or its time was up where it ran: its log holds no error",
        "run this pass again there, with more time and fewer beside it; what it would have shown was not judged",
    )


def _death(failed: Pass) -> tuple[str, str]:
    if "SIGKILL" in failed.detail or "137" in failed.detail:
        return "the system ended it, most likely because the host's memory was full", "free memory (dmesg shows who took it)"
    return f"the process went away in phase {failed.phase!r} without a word of its own", "look at the end of the log"


def _find(text: str) -> Explanation | None:
    for failure in FAILURES:
        match = re.search(failure.pattern, text)
        if match:
            line = _line_around(text, match.start())
            return Explanation(failure.kind, line, failure.cause, failure.remedy, failure.source, failure.rules)
    return None


def _line_around(text: str, at: int) -> str:
    start = text.rfind("\n", 0, at) + 1
    end = text.find("\n", at)
    return text[start : end if end >= 0 else None].strip()[:400]


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return textwrap.shorten(lines[-1], 160, placeholder=" ...") if lines else ""


def signs(log: str, table: tuple[Sign, ...] = WARNINGS) -> list[tuple[Sign, str]]:
    """The signs of a table that a log shows, each with the line that shows it."""
    found = []
    for sign in table:
        match = re.search(sign.pattern, log)
        if match:
            found.append((sign, _line_around(log, match.start())))
    return found
