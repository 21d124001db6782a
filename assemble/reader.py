"""Where the bytes of a checkpoint's shards are read from: its directory, or (`assemble.hub`) a repository on the Hub.

Rules that look at values ask for all they need at once, as spans. So a reader can join spans that lie close together, and
a remote one can fetch them side by side.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from assemble.checkpoint import TensorInfo

GAP_BYTES = 64 * 1024  # spans of a local file that lie closer are read in one go
RUN_BYTES = 1024 * 1024  # and so are read at most this many bytes, if a span is not longer by itself


class Span(NamedTuple):
    """A range of bytes [start, end) of the file `shard`."""

    shard: str
    start: int
    end: int

    @classmethod
    def of(cls, tensor: TensorInfo) -> "Span":
        """Where a tensor's data lies."""
        return cls(tensor.shard, tensor.start, tensor.start + tensor.nbytes)


class Reader(Protocol):
    """Reads spans of shards."""

    def read(self, spans: Sequence[Span]) -> list[bytes]:
        """The bytes of each span, in the order given. What lies beyond the end of a file is left out."""
        ...


class LocalReader:
    """Reads the files of a directory."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def read(self, spans: Sequence[Span]) -> list[bytes]:
        """The bytes of each span, in the order given. What lies beyond the end of a file is left out."""
        found: dict[Span, bytes] = {}
        for shard, group in itertools.groupby(runs(spans, GAP_BYTES, RUN_BYTES), key=lambda run: run[0].shard):
            with (self.root / shard).open("rb") as file:
                for run in group:
                    whole = extent(run)
                    file.seek(whole.start)
                    data = file.read(whole.end - whole.start)
                    found |= {span: data[span.start - whole.start : span.end - whole.start] for span in run}
        return [found[span] for span in spans]


def runs(spans: Iterable[Span], gap_bytes: int, run_bytes: int) -> Iterator[list[Span]]:
    """Sorts spans, and puts those of a shard together that lie within `gap_bytes` of each other.

    A run reaches over `run_bytes` at most, if its first span is not longer by itself.
    """
    run: list[Span] = []
    end = 0
    for span in sorted(set(spans)):
        if run:
            near = run[0].shard == span.shard and span.start - end <= gap_bytes
            if not near or span.end - run[0].start > run_bytes:
                yield run
                run = []
        run.append(span)
        end = max(end, span.end) if len(run) > 1 else span.end
    if run:
        yield run


def extent(run: Sequence[Span]) -> Span:
    """From the start of the first of a run's spans to the furthest end."""
    return Span(run[0].shard, run[0].start, max(span.end for span in run))
