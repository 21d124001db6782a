"""A finished checkpoint to break."""

from pathlib import Path

import pytest

from assemble.checkpoint import Checkpoint
from quantize.runner import Outcome
from tests.assemble.checkpoints import Copy, link_tree


@pytest.fixture
def dense(quantized: Outcome, tiny: Path, tmp_path: Path) -> Copy:
    """A copy of our own finished checkpoint."""
    return Copy(link_tree(quantized.out, tmp_path / "checkpoint"), Checkpoint.open(tiny))
