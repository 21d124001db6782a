"""Spans of files: read whole and right, however they lie."""

from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from assemble.reader import LocalReader, Span, extent, runs

SIZE = 400_000
FILES = {name: bytes((i * step) % 251 for i in range(SIZE)) for name, step in (("a", 7), ("b", 11))}


def spans() -> st.SearchStrategy[list[Span]]:
    place, length = st.integers(0, SIZE), st.integers(0, 5000)
    one = st.builds(lambda shard, start, n: Span(shard, start, min(SIZE, start + n)), st.sampled_from("ab"), place, length)
    return st.lists(one, max_size=30)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("files")
    for name, data in FILES.items():
        (made / name).write_bytes(data)
    return made


@given(wanted=spans())
def test_every_span_is_read_in_the_order_given(root: Path, wanted: list[Span]) -> None:
    assert LocalReader(root).read(wanted) == [FILES[s.shard][s.start : s.end] for s in wanted]


@given(wanted=spans(), gap=st.integers(0, 100_000), limit=st.integers(1, 300_000))
def test_runs_hold_every_span_once_and_keep_the_limits(wanted: list[Span], gap: int, limit: int) -> None:
    found = list(runs(wanted, gap, limit))
    assert [span for run in found for span in run] == sorted(set(wanted))
    for run in found:
        whole = extent(run)
        assert all(s.shard == whole.shard and whole.start <= s.start and s.end <= whole.end for s in run)
        assert whole.end - whole.start <= max(limit, run[0].end - run[0].start)
        reached = accumulate((s.end for s in run), max)
        assert all(later.start - end <= gap for end, later in zip(reached, run[1:], strict=False))


def test_what_lies_beyond_the_end_is_left_out(root: Path) -> None:
    assert LocalReader(root).read([Span("a", SIZE - 3, SIZE + 5), Span("a", SIZE + 1, SIZE + 5)]) == [FILES["a"][-3:], b""]
