"""What a rule is, and what it yields."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from assemble.rules.subject import Subject


class Severity(Enum):
    """ERROR: not fit to serve, `verify` exits with 1. WARNING: serves, but not as it should. INFO: worth knowing."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


class Served(Enum):
    """What vLLM does with a checkpoint that breaks the rule.

    LOUD: it refuses to start. SILENT: it starts and answers, or drafts, garbage, and says nothing or only logs a warning.
    WORSE: it serves right answers, but slower, larger, with less of the model, or another program is the one that stumbles.
    """

    LOUD = "loud"
    SILENT = "silent"
    WORSE = "worse"


class Needs(Enum):
    """What a rule looks at.

    FILES: names of files, index, headers and raw JSON: decidable even when config.json makes no sense. HEADERS: those, and
    what config.json implies. VALUES: tensor values. SOURCE: the checkpoint that this one was made from, values included.
    """

    FILES = "files"
    HEADERS = "headers"
    VALUES = "values"
    SOURCE = "source"


class Mend(Enum):
    """How a finding is mended. CHECKPOINT stands for the directory; BF16 for the checkpoint it was made from."""

    REPAIR = "python -m assemble repair CHECKPOINT --in-place"
    REPAIR_FROM_SOURCE = "python -m assemble repair CHECKPOINT --source BF16 --in-place"
    SPLICE = "python -m assemble splice --head-from BF16 CHECKPOINT"
    FETCH = "cannot be mended from what is here: download or copy the file again"
    QUANTIZE = "cannot be mended from what is here: python -m quantize run BF16 OUT makes it anew"
    MAKE = "nothing to mend: python -m quantize run CHECKPOINT OUT makes a quantized checkpoint of it"
    BY_HAND = "look at it by hand: what is right cannot be known from the checkpoint alone"
    NOTHING = "nothing to mend"


class Detail(NamedTuple):
    """One violation, as a rule yields it; `severity`, `served` and `mend` where they differ from the rule's own."""

    where: str
    found: str
    expected: str
    severity: Severity | None = None
    served: Served | None = None
    mend: Mend | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        rule: The rule's id.
        severity: How bad it is.
        where: The tensor, field or file.
        found: What is there.
        expected: What should be there.
        served: What vLLM does with it.
        why: The rule's one line about what goes wrong.
        mend: The command that mends it, or why none does.
    """

    rule: str
    severity: Severity
    where: str
    found: str
    expected: str
    served: Served
    why: str
    mend: str


@dataclass(frozen=True)
class Rule:
    """One law of the book.

    Attributes:
        id: Stable name, as printed in findings.
        severity: Of its findings, where they do not say otherwise.
        served: What vLLM does when it is broken.
        why: One line: what goes wrong when served.
        source: Where the fact was read.
        check: Yields each violation. Its docstring states the law.
        mend: How its findings are mended.
        needs: What it has to read.
    """

    id: str
    severity: Severity
    served: Served
    why: str
    source: str
    check: Callable[[Subject], Iterable[Detail]]
    mend: Mend = Mend.REPAIR
    needs: Needs = Needs.HEADERS

    @property
    def law(self) -> str:
        """What must hold: the first sentence of the check's docstring, without the id."""
        first = " ".join((self.check.__doc__ or "").split("\n\n")[0].split())
        return first.partition(": ")[2].rstrip(".")
