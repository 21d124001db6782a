"""The checkpoints that the law book is tested on, and the tests that share them."""

from pathlib import Path

import pytest

from assemble.checkpoint import Checkpoint
from quantize.runner import Outcome
from tests.assemble.checkpoints import Copy, link_tree, write_moe

Pair = tuple[Path, Path]  # the BF16 checkpoint, the quantized one


@pytest.fixture(scope="session")
def moe(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A synthetic mixture of experts whose MTP head has fused experts: read only."""
    return write_moe(tiny, tmp_path_factory.mktemp("moe"), split_head=False)


@pytest.fixture(scope="session")
def split_moe(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """The same with a head whose experts are split."""
    return write_moe(tiny, tmp_path_factory.mktemp("split"), split_head=True)


@pytest.fixture(scope="session")
def bases(quantized: Outcome, tiny: Path, moe: Pair, split_moe: Pair) -> dict[str, Pair]:
    """The unbroken checkpoints, each with its source."""
    return {"dense": (tiny, quantized.out), "moe": moe, "split": split_moe}


@pytest.fixture
def dense(bases: dict[str, Pair], tmp_path: Path) -> Copy:
    """A copy of our own finished checkpoint, to break."""
    source, base = bases["dense"]
    return Copy(link_tree(base, tmp_path / "checkpoint"), Checkpoint.open(source))
