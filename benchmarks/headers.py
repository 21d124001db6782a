"""Writes a checkpoint that has a real model's headers and sizes, and no bytes: its shards are sparse files.

27B, 35B-A3B and 122B-A10B are published shapes of the family. What is quantized follows from the `quantization_config` given,
as vLLM would resolve it, so any published config can be given its tensors.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from assemble.architecture import DENSE, LM_HEAD, MOE, WRAPPED_CLASS, Architecture, read_architecture
from assemble.checkpoint import INDEX
from assemble.config import MTP_IGNORE, hf_quant_config, quantization_config
from assemble.formats import FP8, W4A16_NVFP4, TensorSpec, quantized_tensors
from assemble.resolution import Resolution
from assemble.vision import vision_tensors

FULL, LINEAR = "full_attention", "linear_attention"
SHARD_BYTES = 5_000_000_000
_COMMON = {
    "vocab_size": 248320,
    "head_dim": 256,
    "attn_output_gate": True,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "mtp_num_hidden_layers": 1,
    "mamba_ssm_dtype": "float32",
}
_DENSE_27B = {
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 64,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "linear_num_value_heads": 48,
}
_MOE_35B = {
    "hidden_size": 2048,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_hidden_layers": 40,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "linear_num_value_heads": 32,
}
_MOE_122B = _MOE_35B | {
    "hidden_size": 3072,
    "moe_intermediate_size": 1024,
    "shared_expert_intermediate_size": 1024,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "linear_num_value_heads": 64,
}
_VISION = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "in_channels": 3,
    "temporal_patch_size": 2,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "num_position_embeddings": 2304,
}
SHAPES = {"27B": (DENSE, _DENSE_27B), "35B-A3B": (MOE, _MOE_35B), "122B-A10B": (MOE, _MOE_122B)}


def source_config_of(shape: str, **text: Any) -> dict[str, Any]:
    """The config.json of a BF16 model of a shape of `SHAPES`; `text` changes its text_config."""
    kind, sizes = SHAPES[shape]
    sizes = sizes | text
    types = [FULL if i % 4 == 3 else LINEAR for i in range(sizes["num_hidden_layers"])]
    return {
        "architectures": [WRAPPED_CLASS[kind]],
        "model_type": kind,
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        "image_token_id": 248056,
        "video_token_id": 248057,
        "text_config": {"model_type": f"{kind}_text", "layer_types": types, **_COMMON, **sizes},
        "vision_config": {"model_type": f"{kind}_vision", **_VISION, "out_hidden_size": sizes["hidden_size"]},
    }


def config_of(shape: str) -> dict[str, Any]:
    """The config.json of a model of a shape of `SHAPES`, quantized by this project's recipe."""
    config = source_config_of(shape)
    schemes = recipe_schemes(_architecture(config))
    config["quantization_config"] = quantization_config(schemes, MTP_IGNORE, "0.47.0")
    return config


def recipe_schemes(architecture: Architecture) -> dict[str, str]:
    """What this project's recipe makes of each module, a layer's experts as one, as quantized_layers lists them."""
    schemes: dict[str, str] = {}
    for module in architecture.linear_modules:
        if ".mlp.experts." in module:
            schemes[module.partition(".mlp.experts.")[0] + ".mlp.experts"] = W4A16_NVFP4
        elif module.endswith((".mlp.gate", ".shared_expert_gate", ".in_proj_a", ".in_proj_b")):
            continue
        else:
            schemes[module] = W4A16_NVFP4 if ".mlp." in module or module == LM_HEAD else FP8
    return schemes


def _architecture(config: Mapping[str, Any]) -> Architecture:
    return read_architecture(config, ["model.language_model.layers.0.mlp.experts.0.gate_proj.weight"])


def tensors_of(config: Mapping[str, Any]) -> Iterator[TensorSpec]:
    """Every tensor of the checkpoint that a config.json describes; BF16 and with fused experts if it is not quantized."""
    if "quantization_config" not in config:
        architecture = read_architecture(config, ())
        shapes = architecture.body_tensors | (vision_tensors(config) or {}) | architecture.mtp_tensors
        yield from (TensorSpec(name, "BF16", shape) for name, shape in shapes.items())
        return
    architecture = _architecture(config)
    resolution = Resolution(config["quantization_config"], wrapped=architecture.wrapped)
    linear = architecture.linear_modules
    for name, shape in architecture.body_tensors.items():
        module = name.removesuffix(".weight")
        scheme = resolution.built(module) if module in linear else None
        yield from quantized_tensors(module, scheme, shape) if scheme else [TensorSpec(name, "BF16", shape)]
    for name, shape in ((vision_tensors(config) or {}) | architecture.mtp_tensors).items():
        yield TensorSpec(name, "BF16", shape)


def write_headers(root: Path, config: Mapping[str, Any], twin: Mapping[str, Any] | None = None) -> Path:
    """Writes the checkpoint into the new directory `root`: configs, index, side files that say nothing, sparse shards."""
    root.mkdir(parents=True)
    for name, value in _side_files().items():
        (root / name).write_text(json.dumps(value))
    (root / "config.json").write_text(json.dumps(config))
    if q := config.get("quantization_config"):
        schemes = {m: str(e["quant_algo"]) for m, e in q.get("quantized_layers", {}).items()}
        twin = twin or hf_quant_config(schemes, q["ignore"], "0.47.0")
        (root / "hf_quant_config.json").write_text(json.dumps(twin))
    shards = list(_packed(tensors_of(config)))
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_sparse(root / name, tensors)
        weight_map |= dict.fromkeys((t.name for t in tensors), name)
    total = sum(t.nbytes for tensors in shards for t in tensors)
    (root / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    return root


def _side_files() -> dict[str, Any]:
    processors = {"preprocessor_config.json": {}, "video_preprocessor_config.json": {}}
    return {"tokenizer.json": {}, "tokenizer_config.json": {"chat_template": ""}, "generation_config.json": {}} | processors


def _packed(tensors: Iterable[TensorSpec]) -> Iterator[list[TensorSpec]]:
    shard, size = list[TensorSpec](), 0
    for tensor in tensors:
        if shard and size + tensor.nbytes > SHARD_BYTES:
            yield shard
            shard, size = [], 0
        shard.append(tensor)
        size += tensor.nbytes
    yield shard


def _write_sparse(path: Path, tensors: list[TensorSpec]) -> None:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for t in tensors:
        entries[t.name] = {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": [end, end + t.nbytes]}
        end += t.nbytes
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + end)
