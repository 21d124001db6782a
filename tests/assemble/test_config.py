"""The two config files, word for word."""

import json
from pathlib import Path

import pytest

from assemble.architecture import read_architecture
from assemble.config import complete_config, hf_quant_config, quantization_config
from assemble.formats import FP8, W4A16_NVFP4
from quantize.runner import Outcome

SCHEMES = {"model.language_model.layers.0.self_attn.o_proj": FP8, "lm_head": W4A16_NVFP4}
IGNORE = ["mtp*", "mtp.layers.0*"]
EIGHT = {"dynamic": False, "num_bits": 8, "type": "float"}
LAYERS = {
    "model.language_model.layers.0.self_attn.o_proj": {"quant_algo": "FP8"},
    "lm_head": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
}
PRODUCER = {"name": "modelopt", "version": "0.47.0"}


def test_quantization_config() -> None:
    assert quantization_config(SCHEMES, IGNORE, "0.47.0") == {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "producer": PRODUCER,
        "kv_cache_scheme": EIGHT,
        "ignore": IGNORE,
        "config_groups": {
            "group_0": {
                "input_activations": EIGHT,
                "weights": EIGHT,
                "targets": ["model.language_model.layers.0.self_attn.o_proj"],
            },
            "group_1": {
                "weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
                "targets": ["lm_head"],
            },
        },
        "quantized_layers": LAYERS,
    }


def test_hf_quant_config() -> None:
    assert hf_quant_config(SCHEMES, IGNORE, "0.47.0") == {
        "producer": PRODUCER,
        "quantization": {
            "quant_algo": "MIXED_PRECISION",
            "kv_cache_quant_algo": "FP8",
            "exclude_modules": IGNORE,
            "quantized_layers": LAYERS,
        },
    }


def test_spelling_is_the_published_ones(reference: Path) -> None:
    published = json.loads((reference / "nvidia--Qwen3.6-27B-NVFP4_config.json").read_text())["quantization_config"]
    schemes = {m: e["quant_algo"] for m, e in published["quantized_layers"].items()}
    mine = quantization_config(schemes, published["ignore"], published["producer"]["version"])
    assert mine == published


def test_ignore_of_our_own(quantized: Outcome) -> None:
    q = json.loads((quantized.out / "config.json").read_text())["quantization_config"]
    layers = "model.language_model.layers"
    parts = ("conv1d", "in_proj_a", "in_proj_b")
    assert q["ignore"] == [*(f"{layers}.{i}.linear_attn.{p}" for i in range(3) for p in parts), "model.visual*", *IGNORE]


@pytest.mark.parametrize(
    ("text", "top", "changed"),
    [
        ({}, {"dtype": "bfloat16"}, ["mtp_num_hidden_layers"]),
        ({"mtp_num_hidden_layers": 0}, {"torch_dtype": "bfloat16"}, ["mtp_num_hidden_layers"]),
        ({"mtp_num_hidden_layers": 1}, {}, ["dtype"]),
        ({"mtp_num_hidden_layers": 1, "dtype": "bfloat16"}, {}, []),
    ],
)
def test_what_a_source_lacks_is_filled_in(text: dict, top: dict, changed: list[str], tiny: Path) -> None:
    source = json.loads((tiny / "config.json").read_text())
    del source["dtype"], source["text_config"]["mtp_num_hidden_layers"]
    source["text_config"] |= text
    source |= top
    before = json.dumps(source)
    config, changes = complete_config(source, read_architecture(source, []))
    assert [change.partition(":")[0] for change in changes] == changed
    assert config["text_config"]["mtp_num_hidden_layers"] == 1
    assert json.dumps(source) == before
