r"""AIME as the report that this project started from ran it: one sample a problem, one problem at a time, pass@1.

- One chat request a problem, thinking on, no tools, no second try. Temperature 0.6, top_p 0.95, top_k 20, 90,000 tokens.
- Strictly one after the other: long reasoning in a batch was seen to end in loops that run into the token limit.
- The answer is the last `\boxed{}` that holds a whole number. A completion that ended by length is wrong, whatever it
  holds, and is named in the score.
- The share of right answers has a Wilson interval; with 30 problems it is wide, and another sample gives another number.
"""

import re
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from assemble.errors import InputError
from quantize.console import Reporter
from quantize.evaluate.tasks.answers import Answer, AnswerFile, Problem, digest, read_problems
from quantize.evaluate.tasks.proportion import wilson
from quantize.evaluate.tasks.server import RequestError, Served, chat

INSTRUCTION = "\n\nPlease reason step by step, and put your final answer within \\boxed{}."
ANSWERS = "aime.answers.jsonl"
TIMEOUT_SECONDS = 7200.0
BOXED = re.compile(r"\\f?boxed\s*\{")
WRAPPED = re.compile(r"^\\(?:text|mathrm|mathbf|textbf)\s*\{(.*)\}$", re.DOTALL)
DECORATION = re.compile(r"\\[,;!: ]|\{,\}|[,\s$]")  # what a number is written with: \, {,} and the like
WHOLE = re.compile(r"[+-]?\d+")


@dataclass(frozen=True)
class Sampling:
    """How the model is sampled. `thinking` None leaves the chat template's own default."""

    temperature: float = 0.6
    top_p: float = 0.95
    top_k: int = 20
    max_tokens: int = 90_000
    thinking: bool | None = True
    seed: int | None = None

    def options(self) -> dict[str, Any]:
        """The fields of a request."""
        options: dict[str, Any] = {key: value for key, value in asdict(self).items() if key != "thinking" and value is not None}
        if self.thinking is not None:
            options["chat_template_kwargs"] = {"enable_thinking": self.thinking}
        return options


@dataclass(frozen=True)
class Score:
    """What came out. `answers` are in the problems' order."""

    served: Served
    sampling: Sampling
    problems_sha256: str
    answers: list[Answer] = field(repr=False)

    @property
    def correct(self) -> int:
        """Right answers."""
        return sum(answer.correct for answer in self.answers)

    def as_json(self) -> dict[str, Any]:
        """Plain data, without the transcripts."""
        count, tokens = len(self.answers), sum(a.completion_tokens for a in self.answers)
        seconds = sum(a.seconds for a in self.answers)
        low, high = wilson(self.correct, count)
        return {
            "task": "aime",
            "model": self.served.model,
            "problems": count,
            "correct": self.correct,
            "pass_at_1": round(self.correct / count, 4),
            "low": round(low, 4),
            "high": round(high, 4),
            "wrong": [a.name for a in self.answers if not a.correct],
            "finished_by_length": [a.name for a in self.answers if a.finish_reason == "length"],
            "without_answer": [a.name for a in self.answers if a.extracted is None],
            "completion_tokens": tokens,
            "seconds": round(seconds, 1),
            "tokens_per_second": round(tokens / seconds, 1) if seconds else None,
            "protocol": "one sample a problem, one problem at a time, last boxed whole number, ended by length is wrong",
            "instruction": INSTRUCTION.strip(),
            "sampling": asdict(self.sampling),
            "problems_sha256": self.problems_sha256,
        }


def run(
    served: Served, problems: Path, out: Path, sampling: Sampling, reporter: Reporter, timeout_seconds: float = TIMEOUT_SECONDS
) -> Score:
    """Asks each problem that was not answered yet, and scores all answers.

    Args:
        served: The server, from `server.connect`.
        problems: See `answers.read_problems`.
        out: A directory; `aime.answers.jsonl` in it is continued.
        sampling: How to sample.
        reporter: Where progress goes.
        timeout_seconds: How long a problem may take.

    Raises:
        InputError: problems that cannot be read, answers of another run in `out`, or a context too short for an answer.
        RequestError: the server failed; the answers so far are kept.
    """
    _check_room(served, sampling)
    asked = read_problems(problems)
    whole = digest(asked)
    settings = {
        "model": served.model,
        "loaded_from": served.root,
        "sampling": asdict(sampling),
        "instruction": INSTRUCTION,
        "problems_sha256": whole,
    }
    file = AnswerFile(out / ANSWERS, settings)
    left = [problem for problem in asked if problem.name not in file.answers]
    if len(left) < len(asked):
        reporter.line(f"aime: {len(asked) - len(left)} of {len(asked)} problems are answered in {file.path}")
    with reporter.task("aime", len(left)) as progress:
        for problem in left:
            try:
                file.add(_ask(served, problem, sampling, timeout_seconds))
            except RequestError as error:
                kept = f"{len(file.answers)} of {len(asked)} answers are kept: the same command continues."
                raise RequestError(f"problem {problem.name}: {error}. {kept}") from error
            progress(1)
    return Score(served, sampling, whole, [file.answers[problem.name] for problem in asked])


def _check_room(served: Served, sampling: Sampling) -> None:
    room = served.max_model_len
    if room is not None and sampling.max_tokens >= room:
        raise InputError(
            f"{served.model} is served with room for {room} tokens of prompt and answer, and {sampling.max_tokens} are asked "
            "for the answer alone. Serve it with a larger --max-model-len, or give a smaller --max-tokens."
        )


def _ask(served: Served, problem: Problem, sampling: Sampling, timeout_seconds: float) -> Answer:
    started = time.monotonic()
    said = chat(served, problem.text + INSTRUCTION, sampling.options(), timeout_seconds)
    seconds = round(time.monotonic() - started, 1)
    extracted = last_boxed_integer(said.text)
    correct = extracted == problem.answer and said.finish_reason != "length"
    return Answer(
        problem.name,
        correct,
        extracted,
        problem.answer,
        said.finish_reason,
        said.num_tokens,
        seconds,
        said.text,
        said.reasoning,
    )


def last_boxed_integer(text: str) -> int | None:
    r"""The whole number in the last `\boxed{}` that holds one; None where there is none.

    `\boxed{042}` is 42, `\boxed{1{,}000}` and `\boxed{1,000}` are 1000, `\boxed{\text{7}}` is 7.
    """
    found = [number for inner in _boxed(text) if (number := _whole_number(inner)) is not None]
    return found[-1] if found else None


def _boxed(text: str) -> Iterable[str]:
    for match in BOXED.finditer(text):
        depth, start = 1, match.end()
        for end in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                yield text[start:end]
                break


def _whole_number(inner: str) -> int | None:
    inner = inner.strip()
    if wrapped := WRAPPED.match(inner):
        inner = wrapped[1]
    plain = DECORATION.sub("", inner)
    return int(plain) if WHOLE.fullmatch(plain) else None
