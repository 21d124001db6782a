"""AIME's problems and a model's answers to them, as JSON lines on disk.

An answer is written when it is there, so a run that was stopped is continued. The first line of the file says what was
asked and how; another model, other problems or other settings do not continue it.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from assemble.errors import InputError


class ProblemError(InputError):
    """A file of problems that cannot be used."""


class OtherRunError(InputError):
    """Answers of another run are where this one's would go."""


@dataclass(frozen=True)
class Problem:
    """A problem whose answer is a whole number; `name` is its `id`, or its number in the file from 1."""

    name: str
    text: str
    answer: int


@dataclass(frozen=True)
class Answer:
    """What the model made of a problem. `extracted` is None where no boxed number was found."""

    name: str
    correct: bool
    extracted: int | None
    answer: int
    finish_reason: str
    completion_tokens: int
    seconds: float
    text: str
    reasoning: str


def read_problems(path: Path) -> list[Problem]:
    """Reads problems: JSON lines with `problem` (or `question`), `answer` (a whole number), and if you like `id`.

    Raises:
        ProblemError: with the line that cannot be used.
    """
    if not path.is_file():
        raise ProblemError(f"{path} does not exist. --problems takes a .jsonl file with `problem` and `answer` on each line.")
    problems: list[Problem] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            problems.append(_problem(line, f"{path} line {number}", str(len(problems) + 1)))
    names = [problem.name for problem in problems]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ProblemError(f"{path}: the id {min(twice)!r} stands there twice")
    if not problems:
        raise ProblemError(f"{path} holds no problem")
    return problems


def _problem(line: str, where: str, number: str) -> Problem:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ProblemError(f"{where} is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise ProblemError(f"{where} must be a JSON object, found {type(row).__name__}")
    text = row.get("problem", row.get("question"))
    if not isinstance(text, str) or not text.strip():
        raise ProblemError(f"{where} has no text under `problem`; it has {', '.join(map(repr, row)) or 'no field'}")
    try:
        answer = int(str(row["answer"]).strip())
    except (KeyError, ValueError) as error:
        raise ProblemError(f"{where}: `answer` must be a whole number, found {row.get('answer')!r}") from error
    return Problem(str(row.get("id", number)), text, answer)


def digest(problems: list[Problem]) -> str:
    """A hash of problems and answers."""
    return hashlib.sha256(json.dumps([asdict(p) for p in problems], sort_keys=True).encode()).hexdigest()


class AnswerFile:
    """The answers so far, and where more go.

    Args:
        path: A .jsonl file; made when it is not there.
        asked: What the answers depend on; plain data.

    Raises:
        OtherRunError: the file's answers depend on something else.
    """

    def __init__(self, path: Path, asked: Mapping[str, Any]) -> None:
        self.path = path
        self.answers: dict[str, Answer] = {}
        whole = self._whole_lines()
        if not whole:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"asked": asked}, ensure_ascii=False) + "\n", encoding="utf-8")
            return
        self._check(json.loads(whole[0]).get("asked"), json.loads(json.dumps(asked)))
        self.answers = {row["name"]: Answer(**row) for row in map(json.loads, whole[1:])}

    def add(self, answer: Answer) -> None:
        """Writes an answer; it is on the disk when this returns."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(answer), ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.answers[answer.name] = answer

    def _whole_lines(self) -> list[str]:
        """The file's lines; one that was cut off by a crash is taken away."""
        if not self.path.is_file():
            return []
        data = self.path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if whole != data:
            with self.path.open("r+b") as file:
                file.truncate(len(whole))
        return [line for line in whole.decode().split("\n") if line]

    def _check(self, found: Any, asked: Mapping[str, Any]) -> None:
        if found == asked:
            return
        found = found if isinstance(found, dict) else {}
        differ = [
            f"{key}: {found.get(key)!r} there, {asked.get(key)!r} asked for" for key in asked if found.get(key) != asked[key]
        ]
        raise OtherRunError(
            f"{self.path} holds answers of another run ({'; '.join(differ)}). Give another --out, or move that file away."
        )
