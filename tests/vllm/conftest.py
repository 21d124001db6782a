"""What the contract with vLLM's own loader is tested with: the interpreter that has it, and the law book's checkpoints."""

import os
from pathlib import Path

import pytest

from tests.assemble.conftest import bases, moe, split_moe

__all__ = ["bases", "moe", "split_moe", "vllm_python"]

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks every test of this folder `vllm`."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.vllm)


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """The interpreter of the environment that `make vllm-env` makes."""
    path = Path(os.environ.get("VLLM_PYTHON", ROOT / ".venv-vllm/bin/python")).absolute()
    if not path.is_file():
        pytest.skip(f"vLLM's environment is not there ({path}): make vllm-env builds it")
    return path


def release(root: Path) -> None:
    """Makes the shards that are this checkpoint's own sparse: vLLM reads headers only, and hundreds of copies take room."""
    for path in root.glob("*.safetensors"):
        size = path.stat().st_size
        if path.is_symlink() or path.stat().st_nlink > 1 or size < 8:
            continue
        with path.open("rb+") as file:
            header = 8 + int.from_bytes(file.read(8), "little")
            if header < size:
                file.truncate(header)
                file.truncate(size)
