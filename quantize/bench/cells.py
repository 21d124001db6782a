"""What is measured: a cell for each concurrency and category; what a concurrency sums up to; and the knee."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from assemble.errors import InputError

KNEE_SHARE = 0.25  # of what a lone stream gives: what each added stream must still bring


class ResultError(InputError):
    """A result of `vllm bench serve` that lacks what is looked for."""


@dataclass(frozen=True)
class Cell:
    """One run of `vllm bench serve`.

    Attributes:
        category: The prompts' category.
        concurrency: Requests at once.
        tokens_per_second: Output tokens, all requests together.
        ttft_ms: Mean time to the first token.
        itl_ms: Mean time between two arrivals of output. With speculation one arrival brings several tokens.
        itl_p99_ms: Its 99th percentile.
        acceptance_length: Tokens a step, the body's own included; None where the server does not draft.
        completed: Requests that were answered.
        failed: Requests that were not.
    """

    category: str
    concurrency: int
    tokens_per_second: float
    ttft_ms: float
    itl_ms: float
    itl_p99_ms: float
    acceptance_length: float | None
    completed: int
    failed: int


def read_cell(category: str, concurrency: int, result: Mapping[str, Any]) -> Cell:
    """Reads a result file (the keys: vLLM 0.26 and 0.32 benchmarks/serve.py benchmark).

    Raises:
        ResultError: a key is missing, or nothing was answered.
    """
    try:
        completed, failed = int(result["completed"]), int(result.get("failed") or 0)
        if not completed:
            errors = [error for error in result.get("errors") or [] if error]
            why = f": {' '.join(str(errors[0]).split())[:200]}" if errors else ""
            raise ResultError(f"none of the requests of {category!r} at concurrency {concurrency} was answered{why}.")
        length = result.get("spec_decode_acceptance_length")
        return Cell(
            category,
            concurrency,
            float(result["output_throughput"]),
            float(result["mean_ttft_ms"]),
            float(result["mean_itl_ms"]),
            float(result["p99_itl_ms"]),
            float(length) if length is not None else None,
            completed,
            failed,
        )
    except KeyError as error:
        raise ResultError(f"the result of `vllm bench serve` has no {error}. Releases 0.26 to 0.32 have it.") from error


@dataclass(frozen=True)
class Level:
    """One concurrency: the plain mean over the categories."""

    concurrency: int
    tokens_per_second: float
    ttft_ms: float
    itl_ms: float
    itl_p99_ms: float
    acceptance_length: float | None

    @property
    def per_stream(self) -> float:
        """Tokens a second that each of the concurrent requests gets."""
        return self.tokens_per_second / self.concurrency


def levels(cells: Sequence[Cell]) -> list[Level]:
    """The sweep, by rising concurrency."""
    found = []
    for concurrency in sorted({cell.concurrency for cell in cells}):
        some = [cell for cell in cells if cell.concurrency == concurrency]
        lengths = [cell.acceptance_length for cell in some if cell.acceptance_length is not None]
        found.append(
            Level(
                concurrency,
                _mean([cell.tokens_per_second for cell in some]),
                _mean([cell.ttft_ms for cell in some]),
                _mean([cell.itl_ms for cell in some]),
                _mean([cell.itl_p99_ms for cell in some]),
                _mean(lengths) if lengths else None,
            )
        )
    return found


def knee(sweep: Sequence[Level]) -> int | None:
    """The concurrency above which more pays little: the last to which each added stream brought a fourth of a lone one's speed.

    None with fewer than two levels, and when the gain never falls so low: then the knee lies beyond what was tried.
    """
    if len(sweep) < 2:
        return None
    lone = sweep[0].per_stream
    for before, after in itertools.pairwise(sweep):
        gain = (after.tokens_per_second - before.tokens_per_second) / (after.concurrency - before.concurrency)
        if gain < KNEE_SHARE * lone:
            return before.concurrency
    return None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
