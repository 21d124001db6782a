"""Checkpoints to break: one that can be edited in memory and saved, and a small synthetic mixture of experts."""

import dataclasses
import json
import math
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from assemble.architecture import Architecture, experts_container, read_architecture
from assemble.checkpoint import INDEX, read_shard
from assemble.config import MTP_IGNORE, hf_quant_config, quantization_config
from assemble.formats import FP8, W4A16_NVFP4, TensorSpec
from assemble.mend.draft import NEVER_QUANTIZED, Draft
from assemble.mend.found import read_found
from assemble.mend.origins import FP8FromBF16, NVFP4FromBF16, Stored
from assemble.nvfp4 import amax, fp8_scale, tensor_scale
from assemble.writer import ShardWriter

Raw = tuple[str, tuple[int, ...], bytes]  # dtype, shape, bytes
SIDE = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


@dataclass
class Editable:
    """A checkpoint in memory. `metadata` and `total_size` hold what is to be other than true."""

    root: Path
    shards: dict[str, dict[str, Raw]]
    config: dict[str, Any]
    twin: dict[str, Any] | None
    index: dict[str, Any] | None
    metadata: dict[str, dict[str, str]] = field(default_factory=dict)
    total_size: int | None = None

    @classmethod
    def open(cls, root: Path) -> "Editable":
        shards: dict[str, dict[str, Raw]] = {}
        for path in sorted(root.glob("*.safetensors")):
            data = path.read_bytes()
            tensors = read_shard(path).tensors
            shards[path.name] = {t.name: (t.dtype, t.shape, data[t.start : t.start + t.nbytes]) for t in tensors}
        jsons = [json.loads((root / n).read_text()) for n in ("config.json", "hf_quant_config.json", INDEX)]
        return cls(root, shards, *jsons)

    @property
    def q(self) -> dict[str, Any]:
        return self.config["quantization_config"]

    def shard_of(self, name: str) -> str:
        return next(s for s, tensors in self.shards.items() if name in tensors)

    def get(self, name: str) -> Raw:
        return self.shards[self.shard_of(name)][name]

    def put(self, name: str, raw: Raw, shard: str | None = None) -> None:
        """Replaces a tensor, or adds one (to the last shard), in the index too."""
        home = shard or next((s for s, t in self.shards.items() if name in t), max(self.shards))
        self.shards.setdefault(home, {})[name] = raw
        if self.index is not None:
            self.index["weight_map"][name] = home

    def drop(self, name: str) -> Raw:
        """Takes a tensor out, of the index too."""
        raw = self.shards[self.shard_of(name)].pop(name)
        if self.index is not None:
            self.index["weight_map"].pop(name, None)
        return raw

    def save(self) -> Path:
        """Writes it; a JSON file that is None stays away."""
        for path in self.root.glob("*.safetensors"):
            path.unlink()
        for name, tensors in self.shards.items():
            if tensors:
                write_raw(self.root / name, tensors, self.metadata.get(name))
        if self.index is not None:
            true_size = sum(len(raw[2]) for tensors in self.shards.values() for raw in tensors.values())
            self.index["metadata"] = {"total_size": self.total_size or true_size}
        files = (("config.json", self.config), ("hf_quant_config.json", self.twin), (INDEX, self.index))
        for name, value in files:
            (self.root / name).unlink(missing_ok=True)
            if value is not None:
                (self.root / name).write_text(json.dumps(value))
        return self.root


def write_raw(path: Path, tensors: dict[str, Raw], metadata: dict[str, str] | None = None) -> None:
    """Writes a shard; with another `__metadata__` than format pt when given."""
    with ShardWriter(path, [TensorSpec(n, r[0], r[1]) for n, r in tensors.items()]) as writer:
        for name, (_, _, data) in tensors.items():
            writer.write(name, data)
    if metadata is not None:
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length]) | {"__metadata__": metadata}
        if not metadata:
            del header["__metadata__"]
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def tensors_of(root: Path) -> dict[str, Raw]:
    """Every tensor of a checkpoint, wherever it lies."""
    found: dict[str, Raw] = {}
    for path in sorted(root.glob("*.safetensors")):
        data = path.read_bytes()
        for t in read_shard(path).tensors:
            assert t.name not in found, t.name
            found[t.name] = (t.dtype, t.shape, data[t.start : t.start + t.nbytes])
    return found


def random_bf16(shape: tuple[int, ...], rng: np.random.Generator) -> bytes:
    values = rng.standard_normal(math.prod(shape), dtype=np.float32) * 0.05
    return (values.view(np.uint32) >> 16).astype("<u2").tobytes()


MOE = {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "dtype": "bfloat16",
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "attn_output_gate": True,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "vocab_size": 256,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 1024,
    "mamba_ssm_dtype": "float32",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    "mtp_num_hidden_layers": 1,
    "tie_word_embeddings": False,
}


def write_moe(root: Path, tiny: Path, *, split_head: bool = False, seed: int = 0, **fields: Any) -> Path:
    """A BF16 mixture of experts, its experts fused as published ones are; random weights, head in a shard of its own."""
    root.mkdir(parents=True)
    config = MOE | fields
    architecture = dataclasses.replace(read_architecture(config, []), split_head_experts=split_head)
    rng = np.random.default_rng(seed)
    parts = [architecture.body_tensors, architecture.mtp_tensors]
    weight_map = {}
    for i, part in enumerate(parts, 1):
        name = f"model-{i:05d}-of-00002.safetensors"
        write_raw(root / name, {n: ("BF16", s, random_bf16(s, rng)) for n, s in part.items()})
        weight_map |= dict.fromkeys(part, name)
    _write_json(root, config, None, weight_map)
    for name in SIDE:
        shutil.copyfile(tiny / name, root / name)
    return root


def quantize_moe(source: Path, root: Path) -> Path:
    """The NVFP4 checkpoint of `write_moe`'s, made with assemble's own functions; input scales are invented."""
    root.mkdir()
    draft = Draft.of(read_found(source))
    architecture: Architecture = draft.architecture
    tensors = {n: o for n, o in draft.tensors.items() if isinstance(o, Stored)}
    raw: dict[str, Raw] = {}
    schemes: dict[str, str] = {}
    for module in [m for m in architecture.linear_modules if not m.endswith(NEVER_QUANTIZED)]:
        attention = ".self_attn." in module or ".linear_attn." in module
        schemes[experts_container(module)] = FP8 if attention else W4A16_NVFP4
        weight = draft.own_weight(module)
        assert weight is not None
        if attention:
            _compute(FP8FromBF16(module, weight, fp8_scale(amax(weight.bf16_rows()))), raw)
            raw[f"{module}.input_scale"] = ("F32", (), np.float32(0.5).tobytes())
        else:
            group = [w for m in draft.group(module) if (w := draft.own_weight(m)) is not None]
            scale = tensor_scale(np.max([amax(w.bf16_rows()) for w in group]))
            _compute(NVFP4FromBF16(module, weight, scale), raw)
    plain = {n: o for n, o in tensors.items() if n not in raw and not n.endswith((".gate_up_proj", ".down_proj"))}
    plain |= {n: o for n, o in tensors.items() if n.startswith("mtp.")}
    parts = [raw, {n: (o.tensor.dtype, o.tensor.shape, o.read()) for n, o in plain.items()}]
    weight_map = {}
    for i, part in enumerate(parts, 1):
        write_raw(root / f"model-{i:05d}-of-00002.safetensors", part)
        weight_map |= dict.fromkeys(part, f"model-{i:05d}-of-00002.safetensors")
    left = [m for m in architecture.linear_modules if m.endswith(NEVER_QUANTIZED)]
    ignore = [*left, *(n.removesuffix(".weight") for n in plain if n.endswith("conv1d.weight")), *MTP_IGNORE]
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = quantization_config(schemes, ignore, "0.47.0")
    _write_json(root, config, hf_quant_config(schemes, ignore, "0.47.0"), weight_map)
    for name in SIDE:
        shutil.copyfile(source / name, root / name)
    return root


def _compute(computation: NVFP4FromBF16 | FP8FromBF16, raw: dict[str, Raw]) -> None:
    pieces: dict[str, list[bytes]] = {}
    computation.write(lambda name, data, _: pieces.setdefault(name, []).append(data))
    raw |= {s.name: (s.dtype, s.shape, b"".join(pieces[s.name])) for s in computation.specs}


def _write_json(root: Path, config: dict[str, Any], twin: dict[str, Any] | None, weight_map: dict[str, str]) -> None:
    total = sum(len(raw[2]) for raw in tensors_of(root).values())
    (root / "config.json").write_text(json.dumps(config))
    if twin is not None:
        (root / "hf_quant_config.json").write_text(json.dumps(twin))
    (root / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
