"""LoRA adapters: what fits the checkpoint is taken, everything else is refused before a server is started."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from assemble.architecture import Architecture, read_architecture
from assemble.checkpoint import Checkpoint
from assemble.errors import InputError
from assemble.serve.adapter import AdapterError, check_adapter
from assemble.serve.deciding import Wish, decide
from assemble.serve.described import Described
from recipes.serve_profiles import load_profile
from tests.assemble.conftest import Pair

RANK = 8
INNER = "model.language_model.layers."


@pytest.fixture(scope="module")
def architecture(tiny: Path) -> Architecture:
    source = Checkpoint.open(tiny)
    return read_architecture(source.config, source)


@pytest.fixture(scope="module")
def moe_architecture(moe: Pair) -> Architecture:
    source = Checkpoint.open(moe[0])
    return read_architecture(source.config, source)


def pair(module: str, n: int, k: int, rank: int = RANK) -> dict[str, tuple[int, int]]:
    return {f"base_model.model.{module}.lora_A.weight": (rank, k), f"base_model.model.{module}.lora_B.weight": (n, rank)}


def fitting(architecture: Architecture, *leaves: str, rank: int = RANK) -> dict[str, tuple[int, int]]:
    """The matrices of an adapter on every module that ends with one of `leaves`."""
    shapes = {m: s for m, s in architecture.linear_modules.items() if m.endswith(leaves)}
    assert shapes
    return {name: shape for m, (n, k) in shapes.items() for name, shape in pair(m, n, k, rank).items()}


def write(root: Path, tensors: Mapping[str, tuple[int, ...]], **config: Any) -> Path:
    """An adapter as PEFT saves it."""
    root.mkdir(exist_ok=True)
    said = {
        "peft_type": "LORA", "r": RANK, "lora_alpha": 16, "target_modules": ["q_proj"], "bias": "none",
        "base_model_name_or_path": "Qwen/tiny-qwen3_5-mtp",
    }  # fmt: skip
    (root / "adapter_config.json").write_text(json.dumps({k: v for k, v in (said | config).items() if v is not ...}))
    save_file({name: np.zeros(shape, np.float32) for name, shape in tensors.items()}, root / "adapter_model.safetensors")
    return root


KNOWN = ("tiny-qwen3_5-mtp",)


def test_an_adapter_that_fits(architecture: Architecture, tmp_path: Path) -> None:
    leaves = ("q_proj", "o_proj", "in_proj_qkv", "gate_proj", "down_proj", "lm_head")
    tensors = fitting(architecture, *leaves)
    adapter = check_adapter("ft", write(tmp_path / "a", tensors, target_modules=list(leaves)), architecture, KNOWN)
    assert (adapter.rank, adapter.least_max_rank, adapter.experts, adapter.warnings) == (8, 8, None, ())
    assert adapter.modules == len(tensors) / 2
    assert adapter.base == "Qwen/tiny-qwen3_5-mtp"


def test_ranks(architecture: Architecture, tmp_path: Path) -> None:
    tensors = fitting(architecture, "q_proj", rank=20) | fitting(architecture, "gate_proj", rank=70)
    root = write(tmp_path / "a", tensors, r=20, rank_pattern={"mlp.gate_proj": 70})
    adapter = check_adapter("ft", root, architecture, KNOWN)
    assert (adapter.rank, adapter.least_max_rank) == (70, 128)
    with pytest.raises(AdapterError, match=r"gate_proj has lora_A \[70, \d+\].*expected \[20"):
        check_adapter("ft", write(root, tensors, r=20), architecture, KNOWN)
    with pytest.raises(AdapterError, match="rank 600, vLLM serves 512 at most"):
        check_adapter("ft", write(root, tensors, r=600), architecture, KNOWN)


def test_experts_one_by_one_and_fused(moe_architecture: Architecture, tmp_path: Path) -> None:
    split = fitting(moe_architecture, *(f"experts.{e}.gate_proj" for e in range(2)))
    assert check_adapter("ft", write(tmp_path / "a", split), moe_architecture, KNOWN).experts == "split"
    inner, hidden = moe_architecture.linear_modules[f"{INNER}0.mlp.experts.0.gate_proj"]
    everyone = RANK * moe_architecture.num_experts
    fused = pair(f"{INNER}0.mlp.experts.base_layer", 2 * inner, hidden, everyone)
    fused |= pair(f"{INNER}0.mlp.experts", hidden, inner, everyone)
    adapter = check_adapter("ft", write(tmp_path / "b", fused), moe_architecture, KNOWN)
    assert (adapter.experts, adapter.rank) == ("fused", RANK)
    with pytest.raises(AdapterError, match="some routed experts one by one and others fused"):
        check_adapter("ft", write(tmp_path / "c", split | fused), moe_architecture, KNOWN)
    wrong = pair(f"{INNER}0.mlp.experts", hidden, inner)
    with pytest.raises(AdapterError, match=rf"expected \[{everyone}, {inner}\] and \[{hidden}, {everyone}\]"):
        check_adapter("ft", write(tmp_path / "d", wrong), moe_architecture, KNOWN)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("model.layers.3.self_attn.q_proj", "trained on the text-only class. vLLM would load it and never apply it"),
        (
            "model.language_model.layers.9.self_attn.q_proj",
            "which the checkpoint does not have. The adapter was trained on another",
        ),
        ("model.language_model.layers.0.self_attn.q_proj", "which the checkpoint does not have"),
        ("transformer.h.0.attn.c_attn", "which the checkpoint does not have"),
    ],
)
def test_names_that_the_checkpoint_does_not_have(module: str, message: str, architecture: Architecture, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=message):
        check_adapter("ft", write(tmp_path / "a", pair(module, 8, 8)), architecture, KNOWN)


def test_a_text_only_class_takes_both_spellings(architecture: Architecture, tmp_path: Path) -> None:
    text = dict(architecture.text) | {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text"}
    alone = read_architecture(text, ["model.layers.0.mlp.gate_proj.weight"])
    n, k = alone.linear_modules["model.layers.0.mlp.gate_proj"]
    for prefix in ("model.", "model.language_model."):
        root = write(tmp_path / prefix, pair(f"{prefix}layers.0.mlp.gate_proj", n, k))
        assert check_adapter("ft", root, alone, KNOWN).modules == 1


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"use_dora": True}, "DoRA; vLLM does not serve that"),
        ({"bias": "all"}, "trained biases"),
        ({"modules_to_save": ["lm_head"]}, "whole modules beside the adapter"),
        ({"init_lora_weights": "pissa"}, "'pissa', which changes the base model's weights"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; only LORA"),
        ({"r": 0}, "must be positive integers, found 0"),
        ({"r": ...}, "must be positive integers, found None"),
        ({"r": True}, "must be positive integers"),
        ({"rank_pattern": {"a(": 8}}, "which is no pattern"),
    ],
)
def test_kinds_that_are_not_served(config: dict[str, Any], message: str, architecture: Architecture, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=message):
        check_adapter("ft", write(tmp_path / "a", fitting(architecture, "q_proj"), **config), architecture, KNOWN)


def test_broken_files(architecture: Architecture, tmp_path: Path) -> None:
    def refused(message: str, root: Path) -> None:
        with pytest.raises(AdapterError, match=message):
            check_adapter("ft", root, architecture, KNOWN)

    refused("is not a directory", tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    refused("has no adapter_config.json", tmp_path / "empty")
    root = write(tmp_path / "a", {})
    refused("holds no tensor", root)
    (root / "adapter_model.safetensors").unlink()
    (root / "adapter_model.bin").write_bytes(b"\x80")
    refused("adapter_model.bin would have to be unpickled, which can run code", root)
    refused("lora_A only, expected lora_A and lora_B", write(tmp_path / "b", dict(list(pair("m", 8, 8).items())[:1])))
    refused("is no matrix of an adapter", write(tmp_path / "c", {"base_model.model.x.weight": (2, 2)}))
    refused("expected two dimensions", write(tmp_path / "d", {"base_model.model.x.lora_A.weight": (2, 2, 2)}))
    path = write(tmp_path / "e", fitting(architecture, "q_proj")) / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    refused("cut off", tmp_path / "e")
    (tmp_path / "e" / "adapter_config.json").write_text("[]")
    refused("must hold a JSON object", tmp_path / "e")


def test_what_is_only_worth_a_word(architecture: Architecture, tmp_path: Path) -> None:
    tensors = fitting(architecture, "q_proj") | pair("model.visual.blocks.0.attn.qkv", 8, 8) | pair("mtp.fc", 8, 8)
    said = {"base_model_name_or_path": "Qwen/other", "target_modules": ["q_proj", "c_attn"]}
    adapter = check_adapter("ft", write(tmp_path / "a", tensors, **said), architecture, (*KNOWN, ""))
    assert list(adapter.warnings) == [
        "the adapter was trained on Qwen/other, and this checkpoint goes by tiny-qwen3_5-mtp; its shapes fit",
        "target_modules names 'c_attn', which the checkpoint does not have",
        "adapter ft: 1 modules of the vision tower are not used, the server runs without it",
        "adapter ft: 1 modules of the MTP head are not used, drafts come from the base model",
    ]
    unsaid = check_adapter("ft", write(tmp_path / "a", tensors, base_model_name_or_path=None), architecture, KNOWN)
    assert "does not say what it was trained on" in unsaid.warnings[0]


def test_adapters_decide_about_flags(moe_35b: Described, tmp_path: Path, headers: Callable[..., Path]) -> None:
    architecture = moe_35b.architecture
    tensors = fitting(architecture, "layers.3.self_attn.q_proj", "layers.3.mlp.experts.7.up_proj", rank=16)
    adapter = check_adapter("ft", write(tmp_path / "a", tensors, r=16), architecture, ("Qwen-35B-A3B",))
    serving = decide(*load_profile("48gb-agents"), moe_35b, "m", Wish(adapters=(adapter,)))
    given = {flag.name: " ".join(flag.values) for flag in serving.flags}
    assert given["--max-lora-rank"] == "16"
    assert given["--lora-modules"] == f"ft={tmp_path / 'a'}"
    assert "--enable-mixed-moe-lora-format" in given
    assert serving.fit.settings.max_lora_rank == 16
    assert any("--max-lora-rank 16 in place of the profile's 64" in note for note in serving.notes)
    other = dataclasses.replace(adapter, name="other")
    two = decide(*load_profile("96gb"), moe_35b, "m", Wish(adapters=(adapter, other)))
    assert any("`-- --max-loras 2` lets them run side by side" in note for note in two.notes)
    with pytest.raises(InputError, match="two adapters are called 'ft'"):
        decide(*load_profile("96gb"), moe_35b, "m", Wish(adapters=(adapter, adapter)))
    fused = dataclasses.replace(other, experts="fused")
    with pytest.raises(InputError, match="in two forms"):
        decide(*load_profile("96gb"), moe_35b, "m", Wish(adapters=(adapter, fused)))
    with pytest.raises(InputError, match="--no-lora and --lora contradict"):
        decide(*load_profile("96gb"), moe_35b, "m", Wish(adapters=(adapter,), lora=False))
    assert "--enable-lora" not in {flag.name for flag in decide(*load_profile("96gb"), moe_35b, "m", Wish()).flags}
