"""Recipes beside the shipped ones: they quantize less, or are refused before any work."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from assemble.checkpoint import Checkpoint
from assemble.plan import AssemblyPlan
from quantize.modelopt_recipe import ModelOptRecipeError, read_modelopt_recipe
from quantize.planning import build_plan
from recipes import loader
from tests.quantize.streaming.test_engine import planned, quantize

FP8 = {"num_bits": "e4m3", "axis": None}


def off(pattern: str) -> dict[str, Any]:
    return {"quantizer_name": pattern, "enable": False}


def plan_with(root: Path, path: Path, *entries: dict[str, Any], algorithm: Any = "max") -> AssemblyPlan:
    """The plan under the demo recipe's table with some entries after its own."""
    recipe, source = loader.load("demo").recipe, Checkpoint.open(root)
    kind = str(source.config["model_type"])
    table = read_modelopt_recipe({str(k): v for k, v in recipe.modelopt.items()}[kind])
    path.write_text(yaml.safe_dump({"quantize": {"algorithm": algorithm, "quant_cfg": [*map(dict, table.entries), *entries]}}))
    return build_plan(recipe.model_copy(update={"modelopt": {kind: str(path)}, "max_shard_bytes": 500_000}), source, source)


@pytest.mark.parametrize("model", ["tiny", "tiny_moe"])
def test_a_recipe_that_leaves_much(model: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Nothing of layer 1, no lm_head, no FP8 in the last layer: what is quantized has the same bytes as ever."""
    root: Path = request.getfixturevalue(model)
    left = [off("*layers.1.*"), off("lm_head*"), off("*layers.3.self_attn*")]
    plan = plan_with(root, tmp_path / "recipe.yaml", *left)
    assert not [m for m in plan.schemes if ".1." in m.partition("mlp.experts")[0] or m == "lm_head" or "self_attn" in m]
    facts = quantize(plan, tmp_path / "less")
    assert facts["layers_run"] == 3  # the last layer has no input to measure
    quantize(planned(root), tmp_path / "all")
    less, everything = (
        {n: t for p in (tmp_path / out).glob("*.safetensors") for n, t in load_file(p).items()} for out in ("less", "all")
    )
    assert {name for shard in plan.shards for name in (t.name for t in shard.tensors)} == less.keys()
    for name, tensor in less.items():
        module = name.rpartition(".")[0]
        if module in plan.schemes:
            assert tensor.view(-1).tolist() == everything[name].view(-1).tolist(), name


@pytest.mark.parametrize("model", ["tiny", "tiny_moe"])
def test_a_recipe_that_quantizes_nothing_with_data(model: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    root: Path = request.getfixturevalue(model)
    plan = plan_with(root, tmp_path / "recipe.yaml", off("*self_attn*_proj*"), off("*linear_attn*"))
    facts = quantize(plan, tmp_path / "out")
    assert facts["layers_run"] == 0
    assert {p.name for p in (tmp_path / "out").glob("*.safetensors")} == {shard.name for shard in plan.shards}


@pytest.mark.parametrize("module", ["lm_head", "*mlp.experts.*"])
def test_fp8_where_no_input_is_measured(module: str, tiny_moe: Path, tmp_path: Path) -> None:
    entries = [{"quantizer_name": f"{module}.{side}_quantizer", "cfg": FP8} for side in ("weight", "input")]
    with pytest.raises(ModelOptRecipeError, match="lm_head and routed experts can be W4A16_NVFP4 or left"):
        plan_with(tiny_moe, tmp_path / "recipe.yaml", *entries)


@pytest.mark.parametrize(
    "algorithm", ["awq_lite", {"method": "svdquant", "lowrank": 8}, {"method": "mse", "step_size": 0.5}, None]
)
def test_another_algorithm_is_refused_and_not_taken_for_max(algorithm: Any, tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelOptRecipeError, match="max and mse can be done"):
        plan_with(tiny, tmp_path / "recipe.yaml", algorithm=algorithm)
