"""What the tests of the evaluation share: rows, and quantized checkpoints without a calibration of their own."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from assemble.checkpoint import Checkpoint
from quantize.console import Reporter
from quantize.evaluate.rows import Batch, HeldOut, batches
from quantize.evaluate.walk import Walked, walk
from quantize.evaluate.weights import Weights
from quantize.runner import Outcome, run
from quantize.stage import Request
from recipes import loader
from tests.conftest import SHARED

TEXT = (
    '"""Reads a file."""\n\nimport os\n\n\ndef read(path: str) -> bytes:\n'
    '    with open(path, "rb") as file:\n        return file.read()\n'
)


@pytest.fixture(scope="session")
def token_rows(tiny: Path) -> list[np.ndarray]:
    """Three short rows of real code; the last one is shorter."""
    from transformers import AutoTokenizer

    ids = np.array(AutoTokenizer.from_pretrained(tiny)(TEXT * 2)["input_ids"], np.int32)
    return [ids[:48], ids[10:58], ids[20:57]]


@pytest.fixture(scope="session")
def few_batches(token_rows: list[np.ndarray]) -> list[Batch]:
    return batches(token_rows, 96)


@pytest.fixture(scope="session")
def quantized_moe(tiny_moe: Path, calibration: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """A finished run on the tiny mixture: read only."""
    out = tmp_path_factory.mktemp("quantized_moe") / "out"
    return run(Request(str(tiny_moe), out, loader.load("demo"), calibration=calibration, device="cpu"), Reporter())


@pytest.fixture(scope="session")
def walked(few_batches: list[Batch]) -> Callable[[Path, Path], Walked]:
    """Walks a checkpoint and its source over the short rows."""

    def walk_of(source: Path, written: Path) -> Walked:
        origin = Weights(Checkpoint.open(source))
        return walk(origin, Weights(Checkpoint.open(written)), origin, few_batches, "cpu", Reporter())

    return walk_of


@pytest.fixture(scope="session")
def few_rows(token_rows: list[np.ndarray]) -> HeldOut:
    return HeldOut(tuple(token_rows), "code", None, "unknown", 0)


@pytest.fixture(scope="session")
def heldout_file() -> Path:
    """The trained tiny model's held-out rows; they are not ours to ship."""
    path = SHARED / "models" / "tiny-qwen3_5-mtp" / "heldout.jsonl"
    if not path.is_file():
        pytest.skip("the held-out rows are not here")
    return path
