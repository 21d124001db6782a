"""Weights that are not numbers do not get through in silence: the run stops and names the tensor."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from assemble.errors import InputError
from quantize.console import Reporter
from quantize.runner import run
from quantize.stage import Request
from recipes import loader

LAYER = "model.language_model.layers.0"


def spoil(root: Path, name: str, value: float) -> None:
    for shard in root.glob("*.safetensors"):
        tensors = load_file(shard)
        if name in tensors:
            tensors[name] = tensors[name].clone()
            tensors[name].view(-1)[5] = value
            save_file(tensors, shard, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (f"{LAYER}.mlp.down_proj.weight", torch.nan),
        (f"{LAYER}.linear_attn.out_proj.weight", torch.inf),
        (f"{LAYER}.input_layernorm.weight", torch.nan),
        ("mtp.fc.weight", torch.nan),
    ],
)
def test_not_a_number(name: str, value: float, make_variant: Callable[..., Path], calibration: Path, tmp_path: Path) -> None:
    root = make_variant()
    spoil(root, name, value)
    request = Request(str(root), tmp_path / "out", loader.load("demo"), calibration=calibration, device="cpu")
    with pytest.raises(InputError, match=f"tensor {re.escape(name)} holds NaN or infinity"):
        run(request, Reporter())
    assert not (tmp_path / "out").exists()


def test_not_a_number_in_another_checkpoints_head(make_variant: Callable[..., Path], calibration: Path, tmp_path: Path) -> None:
    root, base = make_variant(head="none"), make_variant()
    spoil(base, "mtp.fc.weight", torch.nan)
    request = Request(str(root), tmp_path / "out", loader.load("demo"), None, str(base), calibration, "cpu")
    with pytest.raises(InputError, match=r"tensor mtp\.fc\.weight holds NaN or infinity"):
        run(request, Reporter())
