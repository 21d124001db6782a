"""Checkpoints for the law book's tests: copies that can be broken, and a small synthetic mixture of experts."""

import json
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from assemble.architecture import LM_HEAD, experts_container, read_architecture
from assemble.checkpoint import INDEX, Checkpoint, read_shard
from assemble.config import MTP_IGNORE, hf_quant_config, quantization_config
from assemble.dequantize import dequantize_fp8, dequantize_nvfp4
from assemble.formats import FP8, W4A16_NVFP4, TensorSpec, quantized_tensors
from assemble.vision import vision_tensors
from assemble.writer import ShardWriter

Raw = tuple[str, tuple[int, ...], bytes]  # dtype, shape, bytes
SIDE_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
UNQUANTIZED = (".mlp.gate", ".shared_expert_gate", ".in_proj_a", ".in_proj_b")


def link_tree(base: Path, root: Path) -> Path:
    """A copy of a checkpoint's folder: shards by hard link, everything else by content."""
    root.mkdir(parents=True)
    for path in base.iterdir():
        if path.suffix == ".safetensors":
            os.link(path, root / path.name)
        else:
            shutil.copyfile(path, root / path.name)
    return root


@dataclass
class Copy:
    """A copy to break. Edits of tensors are written by `save`; only the shards they touch are written anew."""

    root: Path
    source: Checkpoint
    _shards: dict[str, dict[str, Raw]] = field(default_factory=dict)
    _touched: set[str] = field(default_factory=set)

    def edit(self, name: str, change: Callable[[dict[str, Any]], Any]) -> None:
        """Changes a JSON file."""
        value = json.loads((self.root / name).read_text())
        change(value)
        (self.root / name).write_text(json.dumps(value))

    def config(self, change: Callable[[dict[str, Any]], Any]) -> None:
        self.edit("config.json", change)

    def text(self, change: Callable[[dict[str, Any]], Any]) -> None:
        self.edit("config.json", lambda c: change(c["text_config"]))

    def q(self, change: Callable[[dict[str, Any]], Any]) -> None:
        self.edit("config.json", lambda c: change(c["quantization_config"]))

    def twin(self, change: Callable[[dict[str, Any]], Any]) -> None:
        self.edit("hf_quant_config.json", lambda c: change(c["quantization"]))

    def index(self, change: Callable[[dict[str, Any]], Any]) -> None:
        self.edit(INDEX, change)

    def layers(self, change: Callable[[dict[str, Any]], Any]) -> None:
        """Changes quantized_layers in both files."""
        self.q(lambda q: change(q["quantized_layers"]))
        self.twin(lambda q: change(q["quantized_layers"]))

    def ignore(self, *entries: str, drop: Iterable[str] = ()) -> None:
        """Adds and drops entries of ignore, in both files."""
        gone = set(drop)
        self.q(lambda q: q.update(ignore=[e for e in q["ignore"] if e not in gone] + list(entries)))
        self.twin(lambda q: q.update(exclude_modules=[e for e in q["exclude_modules"] if e not in gone] + list(entries)))

    @property
    def shards(self) -> dict[str, dict[str, Raw]]:
        """Every tensor of every shard."""
        if not self._shards:
            for path in sorted(self.root.glob("*.safetensors")):
                data = path.read_bytes()
                self._shards[path.name] = {
                    t.name: (t.dtype, t.shape, data[t.start : t.start + t.nbytes]) for t in read_shard(path).tensors
                }
        return self._shards

    def names(self, part: str) -> list[str]:
        """Names that contain `part`."""
        return [n for tensors in self.shards.values() for n in tensors if part in n]

    def get(self, name: str) -> Raw:
        return next(tensors[name] for tensors in self.shards.values() if name in tensors)

    def drop(self, *names: str) -> None:
        for name in names:
            shard = next(s for s, tensors in self.shards.items() if name in tensors)
            del self.shards[shard][name]
            self._touched.add(shard)

    def put(self, name: str, dtype: str, shape: tuple[int, ...], data: bytes, shard: str | None = None) -> None:
        """Adds or replaces a tensor."""
        home = shard or next((s for s, tensors in self.shards.items() if name in tensors), max(self.shards))
        self.shards.setdefault(home, {})[name] = (dtype, shape, data)
        self._touched.add(home)

    def scalar(self, name: str, value: float) -> None:
        self.put(name, "F32", (), np.float32(value).tobytes())

    def scale(self, name: str, factor: float) -> None:
        """Multiplies an F32 scalar."""
        self.scalar(name, float(np.frombuffer(self.get(name)[2], np.float32)[0]) * factor)

    def change(self, name: str, change: Callable[[Any], Any]) -> None:
        """Changes a tensor's bytes, as an array of uint8."""
        dtype, shape, data = self.get(name)
        array = np.frombuffer(data, np.uint8).copy()
        changed = change(array)
        self.put(name, dtype, shape, (array if changed is None else changed).tobytes())

    def rename(self, old: str, new: str) -> None:
        raw = self.get(old)
        shard = next(s for s, tensors in self.shards.items() if old in tensors)
        self.drop(old)
        self.put(new, *raw, shard=shard)

    def bf16(self, *modules: str) -> None:
        """Stores modules as the source has them."""
        for module in modules:
            tensor = self.source[f"{module}.weight"]
            self.drop(*(n for n in self.names(f"{module}.") if n.startswith(f"{module}.") and n != f"{module}.weight"))
            self.put(f"{module}.weight", "BF16", tensor.shape, self.source.read(tensor.name))

    def cast(self, name: str, dtype: str) -> None:
        """Stores a BF16 tensor in another float dtype."""
        _, shape, data = self.get(name)
        numbers = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
        self.put(name, dtype, shape, numbers.astype({"F32": "<f4", "F16": "<f2"}[dtype]).tobytes())

    def save(self) -> None:
        """Writes the touched shards, and an index that fits them."""
        for name in self._touched:
            (self.root / name).unlink(missing_ok=True)
            write_shard(self.root / name, self._shards[name])
        if self._touched:
            write_index(self.root, self._shards)
        self._touched.clear()

    def raw(self, shard: str, change: Callable[[bytes], bytes]) -> None:
        """Changes a file's bytes."""
        data = (self.root / shard).read_bytes()
        (self.root / shard).unlink()
        (self.root / shard).write_bytes(change(data))

    def header(self, shard: str, change: Callable[[dict[str, Any]], Any]) -> None:
        """Changes a shard's header."""

        def rewritten(data: bytes) -> bytes:
            length = int.from_bytes(data[:8], "little")
            value = json.loads(data[8 : 8 + length])
            change(value)
            text = json.dumps(value).encode()
            return len(text).to_bytes(8, "little") + text + data[8 + length :]

        self.raw(shard, rewritten)


def write_shard(path: Path, tensors: dict[str, Raw]) -> None:
    with ShardWriter(path, [TensorSpec(n, raw[0], raw[1]) for n, raw in tensors.items()]) as writer:
        for name, raw in tensors.items():
            writer.write(name, raw[2])


def write_index(root: Path, shards: dict[str, dict[str, Raw]]) -> None:
    total = sum(len(raw[2]) for tensors in shards.values() for raw in tensors.values())
    weight_map = {n: shard for shard, tensors in shards.items() for n in tensors}
    (root / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))


EXPERTS = 8
MOE_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
    "image_token_id": 500,
    "video_token_id": 501,
    "text_config": {
        "model_type": "qwen3_5_moe_text",
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "attn_output_gate": True,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_value_head_dim": 32,
        "vocab_size": 512,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": 1,
    },
    "vision_config": {
        "model_type": "qwen3_5_moe_vision",
        "depth": 1,
        "hidden_size": 64,
        "intermediate_size": 128,
        "in_channels": 3,
        "temporal_patch_size": 2,
        "patch_size": 8,
        "spatial_merge_size": 2,
        "num_position_embeddings": 16,
        "out_hidden_size": 256,
    },
}


def write_moe(tiny: Path, root: Path, *, split_head: bool) -> tuple[Path, Path]:
    """A BF16 mixture of experts with fused experts, and its quantized twin. Returns both folders.

    The numbers are random; the source's quantized weights are what the quantized ones stand for.
    """
    marker = ["mtp.layers.0.mlp.experts.0.gate_proj.weight"] if split_head else []
    names = ["model.language_model.layers.0.mlp.experts.0.gate_proj.weight", *marker]
    architecture = read_architecture(MOE_CONFIG, names)
    rng = np.random.default_rng(7)
    source: dict[str, Raw] = {}
    packed: dict[str, Raw] = {}
    schemes: dict[str, str] = {}
    shared: dict[str, float] = {}
    for name, shape in architecture.body_tensors.items():
        module = name.removesuffix(".weight")
        if module not in architecture.linear_modules or module.endswith(UNQUANTIZED):
            source[name] = ("BF16", shape, random_bf16(shape, rng))
            continue
        scheme = W4A16_NVFP4 if ".mlp." in module or module == LM_HEAD else FP8
        schemes[experts_container(module)] = scheme
        group = module.replace("up_proj", "gate_proj")
        scale = shared.setdefault(group, float(rng.uniform(1e-5, 2e-5) if scheme != FP8 else rng.uniform(1e-4, 2e-4)))
        raw, numbers = _quantized(module, scheme, shape, scale, rng)
        packed |= raw
        source[name] = ("BF16", shape, to_bf16(numbers))
    plain = {n: raw for n, raw in source.items() if n not in packed}
    for name, shape in ((vision_tensors(MOE_CONFIG) or {}) | architecture.mtp_tensors).items():
        plain[name] = ("BF16", shape, random_bf16(shape, rng))
    source = _fused(source, architecture.num_layers) | {n: raw for n, raw in plain.items() if ".mlp.experts." not in n}
    source |= {n: raw for n, raw in plain.items() if n.startswith("mtp.")}
    left = [m for m in architecture.linear_modules if m.endswith(UNQUANTIZED)]
    convolutions = [n.removesuffix(".weight") for n in plain if n.endswith("conv1d.weight")]
    ignore = [*left, *convolutions, "model.visual*", *MTP_IGNORE]
    whole = MOE_CONFIG | {"quantization_config": quantization_config(schemes, ignore, "0.47.0")}
    bf16 = _write(tiny, root / "source", MOE_CONFIG, None, {"a": source})
    twin = hf_quant_config(schemes, ignore, "0.47.0")
    return bf16, _write(tiny, root / "quantized", whole, twin, {"a": packed, "b": plain})


def _quantized(
    module: str, scheme: str, shape: tuple[int, ...], scale: float, rng: np.random.Generator
) -> tuple[dict[str, Raw], np.ndarray]:
    specs = {spec.name.rpartition(".")[2]: spec for spec in quantized_tensors(module, scheme, shape)}
    scalars = {leaf: np.float32(scale) for leaf, spec in specs.items() if spec.dtype == "F32"}
    if scheme == FP8:
        scalars["input_scale"] = np.float32(0.02)
    rows, columns = shape
    if scheme == FP8:
        codes = rng.integers(0, 0x7F, shape, dtype=np.uint8) | (rng.integers(0, 2, shape, dtype=np.uint8) << 7)
        arrays, numbers = {"weight": codes}, dequantize_fp8(codes, scale)
    else:
        codes = rng.integers(0, 256, (rows, columns // 2), dtype=np.uint8)
        blocks = rng.integers(0x68, 0x7F, (rows, columns // 16), dtype=np.uint8)
        arrays, numbers = {"weight": codes, "weight_scale": blocks}, dequantize_nvfp4(codes, blocks, scale)
    raw = {specs[leaf].name: (specs[leaf].dtype, specs[leaf].shape, a.tobytes()) for leaf, a in arrays.items()}
    raw |= {specs[leaf].name: ("F32", (), value.tobytes()) for leaf, value in scalars.items()}
    return raw, numbers


def _fused(source: dict[str, Raw], layers: int) -> dict[str, Raw]:
    """Experts as published checkpoints store them: two 3-D tensors a layer."""
    fused: dict[str, Raw] = {}
    for i in range(layers):
        base = f"model.language_model.layers.{i}.mlp.experts"
        pairs = [source[f"{base}.{e}.{p}_proj.weight"] for e in range(EXPERTS) for p in ("gate", "up")]
        downs = [source[f"{base}.{e}.down_proj.weight"] for e in range(EXPERTS)]
        (rows, columns), (out, inner) = pairs[0][1], downs[0][1]
        fused[f"{base}.gate_up_proj"] = ("BF16", (EXPERTS, 2 * rows, columns), b"".join(raw[2] for raw in pairs))
        fused[f"{base}.down_proj"] = ("BF16", (EXPERTS, out, inner), b"".join(raw[2] for raw in downs))
    return {n: raw for n, raw in source.items() if ".mlp.experts." not in n} | fused


def _write(tiny: Path, root: Path, config: Any, twin: Any, parts: dict[str, dict[str, Raw]]) -> Path:
    root.mkdir(parents=True)
    for name in SIDE_FILES:
        shutil.copyfile(tiny / name, root / name)
    (root / "preprocessor_config.json").write_text("{}")
    (root / "video_preprocessor_config.json").write_text("{}")
    (root / "config.json").write_text(json.dumps(config))
    if twin is not None:
        (root / "hf_quant_config.json").write_text(json.dumps(twin))
    total = len(parts)
    shards = {f"model-{i:05d}-of-{total:05d}.safetensors": tensors for i, tensors in enumerate(parts.values(), 1)}
    for name, tensors in shards.items():
        write_shard(root / name, tensors)
    write_index(root, shards)
    return root


def to_bf16(values: np.ndarray) -> bytes:
    """BF16 bytes, cut off."""
    return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype("<u2").tobytes()


def random_bf16(shape: tuple[int, ...], rng: np.random.Generator) -> bytes:
    return to_bf16(rng.standard_normal(shape).astype(np.float32) * 0.05)
