"""A finished checkpoint to upload, and a hub with a user who may."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from quantize.runner import Outcome
from tests.loopback_hub import LoopbackHub, loopback_hub
from tests.loopback_uploads import Fault

TOKEN = "hf_thisTokenMustNeverBeSeen"  # noqa: S105 - not a secret
REPO = "user/tiny-nvfp4"
SHARD = "model-00002-of-00002.safetensors"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[LoopbackHub]:
    """A hub that knows the user; this process uses it, and is logged in."""
    with loopback_hub() as hub:
        hub.connect(monkeypatch, tmp_path / "home")
        hub.tokens.add(TOKEN)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub


@pytest.fixture
def checkpoint(quantized: Outcome, tmp_path: Path) -> Path:
    """A copy of the finished checkpoint that a test may change."""
    return Path(shutil.copytree(quantized.out, tmp_path / "checkpoint"))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits of the client and of the upload take a hundredth of their time."""
    import time

    real = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: real(seconds / 100))


def faults(hub: LoopbackHub, pattern: str, kind: str, times: int = 1) -> Fault:
    """Adds something that goes wrong."""
    hub.faults.append(Fault(pattern, kind, times))
    return hub.faults[-1]
