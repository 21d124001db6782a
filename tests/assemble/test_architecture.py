"""What a config implies, against transformers' own modules and the published counts."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration, Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration

from assemble.architecture import ConfigError, experts_container, fused_group, read_architecture
from assemble.checkpoint import Checkpoint
from assemble.vision import vision_tensors
from benchmarks.headers import config_of, tensors_of
from tests.assemble.checkpoints import MOE_CONFIG

SPLIT = ["model.language_model.layers.0.mlp.experts.0.gate_proj.weight"]


def test_the_tiny_models_tensors(tiny: Path) -> None:
    checkpoint = Checkpoint.open(tiny)
    architecture = read_architecture(checkpoint.config, checkpoint)
    expected = architecture.body_tensors | architecture.mtp_tensors | (vision_tensors(checkpoint.config) or {})
    assert expected == {name: tensor.shape for name, tensor in checkpoint.items()}
    assert len(architecture.mtp_tensors) == 15


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_names_and_shapes_are_transformers(kind: str, tiny: Path) -> None:
    config = json.loads((tiny / "config.json").read_text()) if kind == "dense" else MOE_CONFIG
    build, read = (
        (Qwen3_5ForConditionalGeneration, Qwen3_5Config)
        if kind == "dense"
        else (Qwen3_5MoeForConditionalGeneration, Qwen3_5MoeConfig)
    )
    with torch.device("meta"):
        model = build(read.from_dict(config))
    architecture = read_architecture(config, [])
    mine = architecture.body_tensors | (vision_tensors(config) or {})
    assert mine == {name: tuple(p.shape) for name, p in model.state_dict().items()}


@pytest.mark.parametrize(("shape", "tensors", "head"), [("27B", 2001, 15), ("35B-A3B", 93_627, 19)])
def test_published_counts(shape: str, tensors: int, head: int) -> None:
    config = config_of(shape)
    assert len(list(tensors_of(config))) == tensors
    assert len(read_architecture(config, SPLIT).mtp_tensors) == head


def test_layouts_of_experts() -> None:
    fused, split = read_architecture(MOE_CONFIG, []), read_architecture(MOE_CONFIG, SPLIT)
    assert (fused.split_experts, split.split_experts) == (False, True)
    assert fused.linear_modules == split.linear_modules
    assert len(split.body_tensors) - len(fused.body_tensors) == 4 * (3 * 8 - 2)
    head = read_architecture(MOE_CONFIG, ["mtp.layers.0.mlp.experts.7.up_proj.weight"])
    assert (head.split_experts, head.split_head_experts, len(head.mtp_tensors)) == (False, True, 17 + 3 * 8)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"model_type": "qwen3_vl"}, "CFG-1"),
        ({"model_type": ["qwen3_5"]}, "CFG-1"),
        ({"architectures": None}, "CFG-1"),
        ({"architectures": ["Qwen3_5ForCausalLM"]}, "CFG-1"),
        ({"text_config": None}, "CFG-1"),
        ({"hidden_size": 0}, "CFG-11"),
        ({"hidden_size": True}, "CFG-11"),
        ({"hidden_size": 10**12}, "CFG-11"),
        ({"num_hidden_layers": 10**6}, "CFG-11"),
        ({"num_experts": 10**6}, "CFG-11"),
        ({"num_hidden_layers": 900, "num_experts": 8000, "layer_types": None}, "CFG-11"),
        ({"layer_types": ["full_attention"]}, "CFG-11"),
        ({"layer_types": [[], 1, None, {}]}, "CFG-11"),
        ({"layer_types": "linear"}, "CFG-11"),
        ({"layer_types": None, "full_attention_interval": 0}, "CFG-11"),
    ],
)  # fmt: skip
def test_configs_that_make_no_sense(change: dict[str, Any], rule: str) -> None:
    config = json.loads(json.dumps(MOE_CONFIG))
    for key, value in change.items():
        (config if key in config else config["text_config"])[key] = value
    with pytest.raises(ConfigError) as error:
        read_architecture(config, [])
    assert error.value.rule == rule
    assert len(str(error.value)) < 500


def test_groups_and_containers() -> None:
    assert fused_group("a.k_proj") == ("a.q_proj", "a.k_proj", "a.v_proj")
    assert fused_group("a.in_proj_a") == ("a.in_proj_b", "a.in_proj_a")
    assert fused_group("a.o_proj") == fused_group("lm_head") == ()
    assert experts_container("x.mlp.experts.3.up_proj") == "x.mlp.experts"
    assert experts_container("x.mlp.shared_expert.up_proj") == "x.mlp.shared_expert.up_proj"


def test_a_tower_that_cannot_be_inferred() -> None:
    vision = MOE_CONFIG["vision_config"]
    assert vision_tensors({"vision_config": vision | {"deepstack_visual_indexes": [1]}}) is None
    assert vision_tensors({"vision_config": vision | {"depth": 10**9}}) is None
    assert vision_tensors({"vision_config": {}}) is None
    assert vision_tensors({}) is None
