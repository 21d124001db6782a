"""vLLM's resolution: cases whose answers were taken from vLLM 0.32 itself (modelopt.py), by running it."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from assemble.resolution import MixedGroupError, PartialGroupError, Resolution, kv_cache_dtype, split_wildcard, tied_by_vllm

L = "model.language_model.layers"
MLP, ATT, GDN = f"{L}.1.mlp", f"{L}.3.self_attn", f"{L}.0.linear_attn"
W4, FP8 = {"quant_algo": "W4A16_NVFP4", "group_size": 16}, {"quant_algo": "FP8"}


def mixed(layers: dict[str, Any], ignore: tuple[str, ...] = (), *, wrapped: bool = True) -> Resolution:
    return Resolution({"quant_algo": "MIXED_PRECISION", "quantized_layers": layers, "ignore": list(ignore)}, wrapped=wrapped)


@pytest.mark.parametrize(
    ("layers", "module", "algo"),
    [
        ({f"{MLP}.down_proj": W4}, f"{MLP}.down_proj", "W4A16_NVFP4"),
        ({f"{MLP}.down_proj": {"quant_algo": "fp8"}}, f"{MLP}.down_proj", "FP8"),
        ({f"{MLP}.down_proj": {"quant_algo": "INT4_AWQ"}}, f"{MLP}.down_proj", None),
        ({"lm_head": W4}, "lm_head", "W4A16_NVFP4"),
        ({"language_model.model.layers.1.mlp.down_proj": W4}, f"{MLP}.down_proj", "W4A16_NVFP4"),
        ({f"{MLP}.gate_proj": W4}, f"{MLP}.up_proj", "W4A16_NVFP4"),  # inferred from its sibling
        ({f"{GDN}.in_proj_z": FP8}, f"{GDN}.in_proj_qkv", "FP8"),
        ({f"{GDN}.in_proj_z": FP8}, f"{GDN}.in_proj_a", None),
        ({f"{MLP}.experts": W4}, f"{MLP}.experts.3.up_proj", "W4A16_NVFP4"),
        ({f"{MLP}.experts.0.up_proj": W4}, f"{MLP}.experts.7.down_proj", "W4A16_NVFP4"),  # the first below the container
        ({f"{MLP}.shared_expert.up_proj": FP8}, f"{MLP}.experts.7.down_proj", "FP8"),  # inherited
        ({f"{MLP}.experts": W4}, f"{MLP}.shared_expert.up_proj", None),
        ({f"{MLP}.gate": FP8}, f"{MLP}.gate", None),  # built without a quantization config
        ({"mtp.fc": FP8}, "mtp.fc", "FP8"),
        ({f"{MLP}.down_proj": W4}, "mtp.layers.0.mlp.down_proj", None),
    ],
)
def test_listed_and_inferred(layers: dict[str, Any], module: str, algo: str | None) -> None:
    assert mixed(layers).built(module) == algo


def test_a_fused_group_of_two_algorithms_raises() -> None:
    with pytest.raises(MixedGroupError):
        mixed({f"{ATT}.q_proj": FP8, f"{ATT}.k_proj": W4}).built(f"{ATT}.v_proj")


@pytest.mark.parametrize(
    ("entry", "module", "excluded"),
    [
        ("lm_head", "lm_head", True),
        ("mtp*", "mtp.layers.0.self_attn.q_proj", True),
        ("mtp*", f"{MLP}.down_proj", False),
        (f"{L}.1", f"{L}.1.mlp.down_proj", True),
        (f"{L}.1", f"{L}.12.mlp.down_proj", True),  # plain substring
        (f"{L}.1.*", f"{L}.12.mlp.down_proj", False),
        (f"{L}.1*", f"{L}.12.mlp.down_proj", True),  # becomes layers.1 and layers.1.*
        ("mlp.gate", f"{MLP}.up_proj", True),  # hits gate_up_proj
        ("*mlp*", f"{MLP}.down_proj", True),
        ("down_proj", f"{MLP}.down_proj", True),
        (f"{MLP}.gate_up_proj", f"{MLP}.up_proj", True),
        (f"{MLP}.experts.3.up_proj", f"{MLP}.experts.5.down_proj", True),  # experts by anything below them
        (f"{MLP}.shared_expert", f"{MLP}.experts.5.down_proj", False),
        ("model.visual*", "model.visual.blocks.0.attn.qkv", True),
        ("model.mtp*", "mtp.fc", False),
    ],
)
def test_the_three_matchers(entry: str, module: str, excluded: bool) -> None:
    resolution = mixed({}, (entry,))
    assert resolution.excluded(resolution.prefix_of(module)) is excluded


def test_a_part_of_a_fused_group_raises() -> None:
    with pytest.raises(PartialGroupError):
        mixed({}, (f"{GDN}.in_proj_a",)).built(f"{GDN}.in_proj_b")
    assert mixed({}, (f"{GDN}.in_proj_a", f"{GDN}.in_proj_b")).built(f"{GDN}.in_proj_b") is None


def test_names_of_the_text_only_class() -> None:
    text = mixed({"model.language_model.layers.0.mlp.down_proj": W4}, wrapped=False)
    assert text.built("model.layers.0.mlp.down_proj") == "W4A16_NVFP4"
    assert text.prefix_of("lm_head") == "lm_head"
    assert mixed({}).prefix_of(f"{ATT}.k_proj") == "language_model.model.layers.3.self_attn.qkv_proj"


def test_plain_algorithms_quantize_all_that_is_not_excluded() -> None:
    q: dict[str, Any] = {"quant_algo": "nvfp4", "ignore": ["lm_head", "*.mlp.gate"]}
    plain = Resolution(q, wrapped=True)
    assert plain.built(f"{MLP}.down_proj") == plain.built("mtp.layers.0.self_attn.o_proj") == "NVFP4"
    assert plain.built("lm_head") is plain.built(f"{MLP}.gate") is plain.built("mtp.fc") is None
    demoted = q | {"config_groups": {"g": {"weights": {}}}}
    assert Resolution(demoted, wrapped=True).built(f"{MLP}.down_proj") == "W4A16_NVFP4"


@pytest.mark.parametrize(
    ("q", "dtype"),
    [
        ({}, "auto"),
        ({"kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}}, "fp8_e4m3"),
        ({"kv_cache_scheme": {"dynamic": True, "num_bits": 8, "type": "float"}}, "auto"),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, "auto"),
        ({"kv_cache_scheme": {"dynamic": 0, "num_bits": 8, "type": "float"}}, "auto"),
        ({"kv_cache_scheme": {"num_bits": 4, "type": "float"}}, "nvfp4"),
        ({"kv_cache_scheme": "FP8"}, "fp8_e4m3"),
        ({"kv_cache_quant_algo": "FP8"}, "fp8_e4m3"),
        ({"quantization": {"kv_cache_quant_algo": "NVFP4"}}, "nvfp4"),
        ({"kv_cache_quant_algo": "INT8"}, "auto"),
        ({"kv_cache_scheme": 8}, "auto"),
    ],
)
def test_kv_cache(q: dict[str, Any], dtype: str) -> None:
    assert kv_cache_dtype(q) == dtype


def test_ties() -> None:
    tied, untied = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
    assert tied_by_vllm(tied, untied, stored=True) == {"0.26": True, "0.32": False}
    assert tied_by_vllm(tied, {}, stored=False) == {"0.26": True, "0.32": True}
    assert tied_by_vllm(untied, tied, stored=True) == {"0.26": True, "0.32": True}
    assert tied_by_vllm(untied, {}, stored=True) == {"0.26": False, "0.32": False}


def test_wildcards() -> None:
    assert split_wildcard("a*") == ("a", "a.*")
    assert split_wildcard("a.*") == ("a.*",)
    assert split_wildcard("*") == ("*",)
    assert split_wildcard("*a*") == ("*a", "*a.*")


@given(ignore=st.lists(st.text("ab.*?[]", max_size=6), max_size=4), module=st.text("ab.", max_size=8))
def test_any_entry_has_an_answer(ignore: list[str], module: str) -> None:
    mixed({"a.b": FP8}, tuple(ignore)).built(module)
