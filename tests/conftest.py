"""What all tests share: the bundled tiny model, variants of it, and one finished run."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test that wants the (loopback) Hub takes this back
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the models are tiny: threads that wait for each other cost more than they give

from quantize import demo
from quantize.console import Reporter
from quantize.runner import Outcome, run
from quantize.stage import Request
from recipes import loader
from tests.variants import Variant, write_variant

SHARED = Path(__file__).parents[2] / "shared"


@pytest.fixture(scope="session")
def tiny() -> Path:
    """The bundled trained model: read only."""
    return demo.MODEL


@pytest.fixture(scope="session")
def tiny_moe() -> Path:
    """The trained tiny mixture of experts: read only."""
    return demo.MOE_MODEL


@pytest.fixture(scope="session")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Calibration text: modules of the standard library."""
    path = tmp_path_factory.mktemp("calibration") / "rows.jsonl"
    demo.write_calibration(path)
    return path


@pytest.fixture(scope="session")
def make_variant(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes a variant of a tiny model into a new directory: `make_variant(shards=3, head="first")`."""
    return lambda **options: write_variant(tmp_path_factory.mktemp("variant") / "model", Variant(**options))


@pytest.fixture(scope="session")
def quantized(tiny: Path, calibration: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """A finished run on the tiny model: read only. Copy `quantized.out` to change it."""
    out = tmp_path_factory.mktemp("quantized") / "out"
    return run(Request(str(tiny), out, loader.load("demo"), calibration=calibration, device="cpu"), Reporter())


@pytest.fixture(scope="session")
def reference() -> Path:
    """NVIDIA's published configs of this recipe; they are not ours to ship."""
    path = SHARED / "reference"
    if not path.is_dir():
        pytest.skip("the reference configs are not here")
    return path
