"""What one pass left behind: the runner's JSON, the log beside it, and how the process ended."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from assemble.errors import InputError
from quantize.smoke.settings import PROTOCOL


class End(StrEnum):
    """How a pass ended."""

    FINISHED = "finished"
    FAILED = "failed"  # the runner caught an error and wrote it down
    DIED = "died"  # the process is gone and said nothing
    TIMEOUT = "timeout"
    UNKNOWN = "unknown"  # a result that was brought here, unfinished


@dataclass(frozen=True)
class Step:
    """One generated token: its id, its log probability, and the best candidates' by id. Nats; NaN where vLLM gave NaN."""

    token: int
    logprob: float
    candidates: Mapping[int, float]

    def of(self, token: int) -> float | None:
        """The log probability of a token, or None when it is not among the candidates."""
        return self.candidates.get(token)


@dataclass(frozen=True)
class Output:
    """One prompt's continuation."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    text: str
    finish_reason: str | None
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Pass:
    """One pass.

    Attributes:
        name: `plain`, `mtp` or `graphs`.
        result: What the runner wrote; empty when it wrote nothing.
        log: What vLLM printed.
        end: How it ended.
        detail: For a process that died or ran out of time: the exit code or the limit, in words.
    """

    name: str
    result: Mapping[str, Any]
    log: str
    end: End
    detail: str = ""

    @property
    def finished(self) -> bool:
        """Whether every phase was done."""
        return self.end is End.FINISHED

    @property
    def phase(self) -> str:
        """The phase it was in, or `done`."""
        return str(self.result.get("phase", "start"))

    @property
    def loaded(self) -> bool:
        """Whether vLLM took the checkpoint."""
        return "resolved" in self.result

    @property
    def outputs(self) -> list[Output]:
        """The prompts' continuations; empty when it did not come to that."""
        return [_output(row) for row in self.result.get("outputs", [])]

    @property
    def error(self) -> str:
        """The error's type and message, or nothing."""
        error = self.result.get("error")
        return f"{error['type']}: {error['message']}" if error else ""


def read_pass(name: str, path: Path, end: End | None = None, detail: str = "") -> Pass:
    """Reads a result and the log beside it.

    Args:
        name: The pass's name.
        path: The result; it need not be there.
        end: How the process ended, where that is known; else it is told from the result.
        detail: See `Pass`.

    Raises:
        InputError: a file that is no result of the runner of this version.
    """
    result: dict[str, Any] = {}
    if path.is_file():
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise InputError(f"{path} is not a result of the smoke runner: {error}.") from error
        if not isinstance(result, dict) or result.get("protocol") != PROTOCOL:
            raise InputError(f"{path} is not a result of this version's smoke runner (protocol {PROTOCOL}). Run it again.")
    log = path.with_suffix(".log")
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    if result.get("ok"):
        end = End.FINISHED
    elif end is None:
        end = End.FAILED if result.get("error") else End.UNKNOWN
    return Pass(name, result, text, end, detail)


def number(value: Any) -> float:
    """A number as the runner writes it, where NaN and the infinities are words."""
    return float(value) if value is not None else math.nan


def _output(row: Mapping[str, Any]) -> Output:
    return Output(
        tuple(row["prompt_token_ids"]),
        tuple(row["token_ids"]),
        str(row["text"]),
        row.get("finish_reason"),
        tuple(_steps(row.get("steps") or [])),
    )


def _steps(rows: Sequence[Mapping[str, Any]]) -> Iterator[Step]:
    for row in rows:
        candidates = {int(token): number(logprob) for token, logprob in row["top"]}
        yield Step(int(row["id"]), number(row["logprob"]), candidates)
