"""The checkpoints that `fit` is tested on: the tensors of true shapes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from assemble.checkpoint import Checkpoint, TensorInfo
from assemble.fit import Model, read_model
from benchmarks.headers import config_of, source_config_of, tensors_of, write_headers


def checkpoint_of(config: dict[str, Any], name: str) -> Checkpoint:
    """The checkpoint that a config.json describes, as its headers would be read."""
    tensors = {t.name: TensorInfo(t.name, t.dtype, t.shape, "model.safetensors", 0, t.nbytes) for t in tensors_of(config)}
    return Checkpoint(Path(name), config, tensors, ())


def relisted(config: dict[str, Any], algorithm: str | None, keep: Callable[[str], bool]) -> dict[str, Any]:
    """A quantized config with fewer modules listed, and all of them in one algorithm when one is given."""
    listed = config["quantization_config"]["quantized_layers"]
    kept = {module: {"quant_algo": algorithm} if algorithm else entry for module, entry in listed.items() if keep(module)}
    return config | {"quantization_config": config["quantization_config"] | {"quantized_layers": kept}}


@pytest.fixture(scope="session")
def root_27b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A 27B as this project's recipe makes it, as sparse files."""
    return write_headers(tmp_path_factory.mktemp("fit") / "27B", config_of("27B"))


@pytest.fixture(scope="session")
def model_27b(root_27b: Path) -> Model:
    """The same, read."""
    return read_model(Checkpoint.open(root_27b), "27B")


@pytest.fixture(scope="session")
def bf16_27b() -> Model:
    """The BF16 27B."""
    return read_model(checkpoint_of(source_config_of("27B"), "27B-BF16"))


@pytest.fixture(scope="session")
def model_35b() -> Model:
    """A 35B-A3B as this project's recipe makes it."""
    return read_model(checkpoint_of(config_of("35B-A3B"), "35B"))


@pytest.fixture(scope="session")
def experts_only_35b() -> Model:
    """A 35B-A3B with NVFP4 experts and everything else in BF16: the larger kind that is published."""
    config = relisted(config_of("35B-A3B"), None, lambda module: ".mlp.experts" in module)
    return read_model(checkpoint_of(config, "35B-experts"))


@pytest.fixture(scope="session")
def fp8_35b() -> Model:
    """A 35B-A3B in FP8, lm_head apart; it declares an FP8 cache as well, which the tests override."""
    config = relisted(config_of("35B-A3B"), "FP8", lambda module: module != "lm_head")
    return read_model(checkpoint_of(config, "35B-FP8"))
