"""Our reader of ModelOpt's recipe files against ModelOpt's own, for every recipe that we ship a name of."""

from pathlib import Path
from typing import Any

import pytest

from quantize.modelopt_recipe import ModelOptRecipe, ModelOptRecipeError, read_modelopt_recipe
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


NVFP4 = "num_bits: e2m1, block_sizes: {-1: 16, type: static, scale_bits: e4m3"


def own(path: Path, *entries: str, algorithm: str = "max") -> ModelOptRecipe:
    """A recipe that turns everything off, and then says these."""
    table = "".join(f"    - {{{entry}}}\n" for entry in ("quantizer_name: '*', enable: false", *entries))
    path.write_text(f"quantize:\n  algorithm: {algorithm}\n  quant_cfg:\n{table}")
    return read_modelopt_recipe(str(path))


@pytest.mark.parametrize(
    "cfg",
    [
        f"{{{NVFP4}, four_over_six: true}}}}",
        "{num_bits: e2m1, block_sizes: {-1: 16, type: static, scale_bits: e8m0}}",
        "{num_bits: e2m1, block_sizes: {-1: 16, type: static}}",
        f"{{{NVFP4}}}, rotate: true}}",
        f"{{{NVFP4}}}, type: dynamic}}",
        f"{{{NVFP4}}}, nobody knows: this}}",
        "[{num_bits: 4}, {num_bits: e4m3}]",
    ],
)
def test_what_would_be_written_otherwise_than_it_says_is_refused(cfg: str, tmp_path: Path) -> None:
    """Each was taken for plain NVFP4, or broke the program."""
    recipe = own(tmp_path / "mine.yaml", f"quantizer_name: '*up_proj.weight_quantizer', cfg: {cfg}")
    with pytest.raises(ModelOptRecipeError, match=r"Only FP8 \(per tensor\) and W4A16_NVFP4 can be written"):
        recipe.scheme(f"{LAYER}.mlp.up_proj")


def test_what_changes_nothing_is_taken(tmp_path: Path) -> None:
    cfg = f"{{{NVFP4}, four_over_six: false}}, effective_bits: 4.5, axis: null, rotate: false}}"
    entry = f"quantizer_name: '*up_proj.weight_quantizer', cfg: {cfg}"
    assert own(tmp_path / "max.yaml", entry).scheme(f"{LAYER}.mlp.up_proj") == "W4A16_NVFP4"


@pytest.mark.parametrize("extra", ["use_constant_amax: true", "type: dynamic", "bias: {enable: true}", "unsigned: true"])
def test_fp8_inputs_of_another_kind_are_refused(extra: str, tmp_path: Path) -> None:
    recipe = own(
        tmp_path / "mine.yaml",
        "quantizer_name: '*q_proj.weight_quantizer', cfg: {num_bits: e4m3}",
        f"quantizer_name: '*q_proj.input_quantizer', cfg: {{num_bits: e4m3, {extra}}}",
    )
    with pytest.raises(ModelOptRecipeError, match=r"Only FP8 \(per tensor\)"):
        recipe.scheme(f"{LAYER}.self_attn.q_proj")


def test_mse_searches_for_static_blocks_only(tmp_path: Path) -> None:
    cfg = "{num_bits: e2m1, block_sizes: {-1: 16, type: KIND, scale_bits: e4m3}}"
    entry = f"quantizer_name: '*up_proj.weight_quantizer', cfg: {cfg}"
    sweep = "{method: mse, fp8_scale_sweep: true}"
    static = own(tmp_path / "static.yaml", entry.replace("KIND", "static"), algorithm=sweep)
    assert (static.method, static.scheme(f"{LAYER}.mlp.up_proj")) == ("mse", "W4A16_NVFP4")
    dynamic = own(tmp_path / "dynamic.yaml", entry.replace("KIND", "dynamic"), algorithm=sweep)
    with pytest.raises(ModelOptRecipeError, match="with mse, static blocks"):
        dynamic.scheme(f"{LAYER}.mlp.up_proj")


def test_turned_on_again_is_what_it_was(tmp_path: Path) -> None:
    """As ModelOpt's `set_quantizer_by_cfg` does it; it was taken for off."""
    on = [f"quantizer_name: '*.{side}_quantizer', cfg: {{num_bits: e4m3}}" for side in ("weight", "input")]
    off = "quantizer_name: '*self_attn*', enable: false"
    recipe = own(tmp_path / "mine.yaml", *on, off, "quantizer_name: '*q_proj*', enable: true")
    assert recipe.scheme(f"{LAYER}.self_attn.q_proj") == "FP8"
    assert recipe.scheme(f"{LAYER}.self_attn.k_proj") is None
    never = own(tmp_path / "never.yaml", "quantizer_name: '*q_proj*', enable: true")  # ModelOpt's defaults: 8 bits, integer
    with pytest.raises(ModelOptRecipeError, match="can be written"):
        never.scheme(f"{LAYER}.self_attn.q_proj")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("quantizer_name: '*', parent_class: nn.Linear, cfg: {num_bits: e4m3}", "for modules by class"),
        ("parent_class: hf.Attention, quantizer_name: '*', enable: false", "for modules by class"),
        ("'*weight_quantizer': {num_bits: e4m3}", "has no quantizer_name"),
        ("quantizer_name: '*'", "neither cfg nor enable"),
        ("quantizer_name: '*', cfg: {}", "empty cfg"),
        ("quantizer_name: '*', quantizer_name: '*q*', enable: false", "there twice"),
        ("quantizer_name: '*', cfg: {$import: nowhere}", r"\$import: nowhere"),
        ("quantizer_name: '*', cfg: [", "is not valid YAML"),
    ],
)
def test_entries_that_would_be_passed_over_are_refused(entry: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelOptRecipeError, match=message):
        own(tmp_path / "mine.yaml", entry)


def test_files_that_cannot_be_followed(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ModelOptRecipeError, match="cannot be read"):
        read_modelopt_recipe(str(path))
    path = tmp_path / "circle.yaml"
    path.write_text(f"imports: {{me: {path}}}\nquantize: {{$import: me}}\n")
    with pytest.raises(ModelOptRecipeError, match="imports itself"):
        read_modelopt_recipe(str(path))


@pytest.mark.parametrize("part", ["q_bmm", "softmax"])
def test_other_parts_of_attention_are_refused(part: str, tmp_path: Path) -> None:
    cache = "quantizer_name: '*[kv]_bmm_quantizer', cfg: {num_bits: e4m3, use_constant_amax: true}"
    own(tmp_path / "cache.yaml", cache).check_kv_cache(f"{LAYER}.self_attn")
    more = own(tmp_path / "more.yaml", cache, f"quantizer_name: '*{part}_quantizer', cfg: {{num_bits: e4m3}}")
    with pytest.raises(ModelOptRecipeError, match=f"gives {part} of attention"):
        more.check_kv_cache(f"{LAYER}.self_attn")
