"""Our reader of ModelOpt's recipe files against ModelOpt's own, for every recipe that we ship a name of."""

from pathlib import Path
from typing import Any

import pytest

from quantize.modelopt_recipe import ModelOptRecipeError, read_modelopt_recipe
from recipes.loader import load, shipped_names

NAMES = sorted({name for shipped in shipped_names() for name in load(shipped).recipe.modelopt.values()})
BITS = {"e2m1": (2, 1), "e4m3": (4, 3)}
LAYER = "model.language_model.layers.3"


def ours(entry: dict[str, Any]) -> tuple:
    config = entry.get("cfg") or {}
    blocks = config.get("block_sizes") or {}
    return (
        entry["quantizer_name"], entry.get("parent_class"), entry.get("enable", True), BITS.get(config.get("num_bits")),
        blocks.get(-1), blocks.get("type"), config.get("axis"), config.get("use_constant_amax", False),
    )  # fmt: skip


def theirs(entry: dict[str, Any]) -> tuple:
    config = entry["cfg"] or {}
    blocks = config.get("block_sizes") or {}
    bits = tuple(config["num_bits"]) if config else None
    return (
        entry["quantizer_name"], entry["parent_class"], entry["enable"], bits,
        blocks.get(-1), blocks.get("type"), config.get("axis"), config.get("use_constant_amax", False),
    )  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_equals_modelopts_reading(name: str) -> None:
    from modelopt.recipe import load_recipe

    quantize = load_recipe(name).quantize.model_dump()
    mine = read_modelopt_recipe(name)
    assert mine.method == quantize["algorithm"]["method"]
    assert [ours(dict(e)) for e in mine.entries] == [theirs(e) for e in quantize["quant_cfg"]]


@pytest.mark.parametrize("name", NAMES)
def test_what_it_makes_of_modules(name: str) -> None:
    recipe = read_modelopt_recipe(name)
    expected = {
        "mlp.gate_proj": "W4A16_NVFP4", "mlp.experts.7.down_proj": "W4A16_NVFP4", "mlp.shared_expert.up_proj": "W4A16_NVFP4",
        "self_attn.q_proj": "FP8", "linear_attn.in_proj_qkv": "FP8", "linear_attn.out_proj": "FP8",
        "linear_attn.in_proj_a": None, "mlp.gate": None, "mlp.shared_expert_gate": None,
    }  # fmt: skip
    assert {module: recipe.scheme(f"{LAYER}.{module}") for module in expected} == expected
    assert recipe.scheme("lm_head") == "W4A16_NVFP4"
    assert recipe.scheme("mtp.layers.0.mlp.gate_proj") is None
    assert recipe.scheme("model.visual.blocks.0.mlp.linear_fc1") is None
    recipe.check_kv_cache(f"{LAYER}.self_attn")


def test_a_recipe_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "imports: {fp8: configs/numerics/fp8}\n"
        "quantize:\n"
        "  algorithm: {method: max}\n"
        "  quant_cfg:\n"
        "    - {quantizer_name: '*', enable: false}\n"
        "    - {quantizer_name: '*q_proj*quantizer', cfg: {$import: fp8}}\n"
    )
    recipe = read_modelopt_recipe(str(path))
    assert recipe.scheme(f"{LAYER}.self_attn.q_proj") == "FP8"
    assert recipe.scheme(f"{LAYER}.self_attn.k_proj") is None
    with pytest.raises(ModelOptRecipeError, match="KV cache"):
        recipe.check_kv_cache(f"{LAYER}.self_attn")
    with pytest.raises(ModelOptRecipeError, match="has no recipe"):
        read_modelopt_recipe("huggingface/nowhere")
