"""The main job on the CPU, end to end, against ModelOpt's own exporter and against the source."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from assemble.checkpoint import Checkpoint
from assemble.dequantize import dequantize_nvfp4
from quantize.console import Reporter
from quantize.runner import Outcome, run
from quantize.stage import Request
from recipes import loader
from tests.quantize.oracle import compare_with_oracle

VARIANTS = [
    {"moe": True},
    {"moe": True, "split": True, "shards": 4, "head": "own"},
    {"moe": True, "text_only": True, "float32": True},
    {"moe": True, "text_only": True, "keep_prefix": True, "split": True},
    {"shards": 5, "head": "first", "float32": True},
    {"shards": 3, "head": "own"},
    {"shards": 2, "head": "last", "text_only": True},
    {"shards": 1, "head": "first", "text_only": True, "keep_prefix": True, "float32": True},
]


def test_equals_modelopt_and_source(quantized: Outcome, tiny: Path, calibration: Path, tmp_path: Path) -> None:
    request = Request(str(tiny), quantized.out, loader.load("demo"), calibration=calibration, device="cpu")
    compare_with_oracle(request, quantized, tmp_path)


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_variants_equal_modelopt_and_source(
    options: dict, make_variant: Callable[..., Path], calibration: Path, tmp_path: Path
) -> None:
    root = make_variant(**options)
    request = Request(str(root), tmp_path / "out", loader.load("demo"), calibration=calibration, device="cpu")
    compare_with_oracle(request, run(request, Reporter()), tmp_path / "oracle")


def test_a_starved_router_changes_no_experts_bytes(
    make_variant: Callable[..., Path], calibration: Path, tmp_path: Path
) -> None:
    made = []
    for starved in (False, True):
        root, out = make_variant(moe=True, starved=starved), tmp_path / str(starved)
        run(Request(str(root), out, loader.load("demo"), calibration=calibration, device="cpu"), Reporter())
        made.append(Checkpoint.open(out))
    experts = [n for n in made[0] if ".mlp.experts." in n and not n.startswith("mtp.")]
    assert len(experts) == 4 * 8 * 3 * 3
    assert all(made[0].read(n) == made[1].read(n) for n in experts)
    scales = [n for n in made[0] if n.endswith("input_scale")]
    assert any(made[0].read(n) != made[1].read(n) for n in scales)  # the router did change what the layers see


def test_config_is_the_sources_plus_quantization(quantized: Outcome, tiny: Path) -> None:
    config = json.loads((quantized.out / "config.json").read_text())
    del config["quantization_config"]
    assert config == json.loads((tiny / "config.json").read_text())


def test_only_known_files_and_side_files_are_the_sources(quantized: Outcome, tiny: Path) -> None:
    side = {"chat_template.jinja", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    made = {"README.md", "config.json", "hf_quant_config.json", "provenance.json", "model.safetensors.index.json"}
    shards = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}
    assert {p.name for p in quantized.out.iterdir()} == side | made | shards
    for name in side:
        assert (quantized.out / name).read_bytes() == (tiny / name).read_bytes()


def test_written_bytes_are_the_planned_ones(quantized: Outcome) -> None:
    made = Checkpoint.open(quantized.out)
    index = json.loads((quantized.out / "model.safetensors.index.json").read_text())
    planned = quantized.records["plan"].facts["total_size"]
    assert sum(t.nbytes for t in made.values()) == planned == index["metadata"]["total_size"]
    assert quantized.records["plan"].facts["counts"] == {"FP8": 13, "W4A16_NVFP4": 13}


def test_dequantized_weight_is_close_to_the_source(quantized: Outcome, tiny: Path) -> None:
    made, source = Checkpoint.open(quantized.out), Checkpoint.open(tiny)
    module = "model.language_model.layers.1.mlp.down_proj"
    rows, half = made[f"{module}.weight"].shape
    packed = np.frombuffer(made.read(f"{module}.weight"), np.uint8).reshape(rows, half)
    scales = np.frombuffer(made.read(f"{module}.weight_scale"), np.uint8).reshape(rows, half // 8)
    tensor_scale = float(np.frombuffer(made.read(f"{module}.weight_scale_2"), np.float32)[0])
    mine = dequantize_nvfp4(packed, scales, tensor_scale).ravel()
    bf16 = np.frombuffer(source.read(f"{module}.weight"), np.uint16).astype(np.uint32) << 16
    truth = bf16.view(np.float32)
    assert mine @ truth / (np.linalg.norm(mine) * np.linalg.norm(truth)) > 0.99


def test_a_finished_run_is_left_alone(quantized: Outcome, tiny: Path, calibration: Path) -> None:
    before = {p.name: p.stat().st_mtime_ns for p in quantized.out.iterdir()}
    again = run(Request(str(tiny), quantized.out, loader.load("demo"), calibration=calibration, device="cpu"), Reporter())
    assert again.already_complete
    assert {p.name: p.stat().st_mtime_ns for p in quantized.out.iterdir()} == before
    assert not list(quantized.out.with_name("out.run").rglob("*.safetensors"))
