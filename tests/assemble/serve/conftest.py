"""Checkpoints to serve: headers of real sizes without data, and the tiny ones."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from assemble.serve.described import Described, describe
from benchmarks.headers import config_of, source_config_of, write_headers


@pytest.fixture(scope="session")
def headers(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes a checkpoint of headers: `headers("27B")`; a key of its text config may be changed, or the BF16 model taken."""
    made: dict[Any, Path] = {}

    def write(shape: str, *, quantized: bool = True, **text: Any) -> Path:
        key = (shape, quantized, tuple(text.items()))
        if key not in made:
            config = config_of(shape) if quantized else source_config_of(shape)
            config["text_config"].update({"max_position_embeddings": 262144, **text})
            made[key] = write_headers(tmp_path_factory.mktemp("headers") / f"Qwen-{shape}", config)
        return made[key]

    return write


@pytest.fixture(scope="session")
def dense_27b(headers: Callable[..., Path]) -> Described:
    """A 27B of this project's recipe."""
    return describe(headers("27B"))


@pytest.fixture(scope="session")
def moe_35b(headers: Callable[..., Path]) -> Described:
    """A 35B-A3B of this project's recipe."""
    return describe(headers("35B-A3B"))
