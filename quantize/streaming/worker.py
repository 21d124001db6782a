"""The other processes of a run under `torchrun`: they take part in the quantize stage, and wait otherwise."""

import contextlib
from collections.abc import Iterator
from typing import Any

from quantize.console import Advance, Reporter
from quantize.streaming.ranks import find_ranks


class Silent(Reporter):
    """Reports nothing: rank 0 speaks for all."""

    def line(self, text: str) -> None:
        """Nothing."""

    @contextlib.contextmanager
    def task(self, description: str, total: int) -> Iterator[Advance]:
        """Nothing, on a terminal either."""

        def advance(n: int, reached: str = "") -> None:
            """Nothing."""

        yield advance


def follow() -> None:
    """Does this process's share of what rank 0 has to do, until rank 0 is done."""
    from quantize.stages.quantize import work

    ranks = find_ranks()
    ranks.join()
    task: Any = ranks.broadcast(None)
    while task is not None:
        work(task, Silent())
        task = ranks.broadcast(None)
    ranks.leave()


def dismiss() -> None:
    """Rank 0 has nothing more to do: lets the others go."""
    ranks = find_ranks()
    if not ranks.alone and ranks.rank == 0:
        ranks.join()
        ranks.broadcast(None)
        ranks.leave()
