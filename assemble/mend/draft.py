"""The checkpoint to be: it starts as what was found, and the repairs change it, one after the other."""

import copy
import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from assemble.architecture import Architecture, experts_container, fused_experts, fused_group, read_architecture
from assemble.checkpoint import Checkpoint, TensorInfo
from assemble.formats import COMPANIONS, FP8, SCHEMES, W4A16_NVFP4
from assemble.mend.found import Found
from assemble.mend.origins import Computation, Origin, Stored
from assemble.writer import read_chunks

# vLLM builds these unquantized whatever a config says: qwen_gdn_linear_attn.py, qwen3_next.py (vLLM 0.33); in_proj_a and
# in_proj_b have too few rows for the kernels (vllm#35924).
NEVER_QUANTIZED = (".in_proj_a", ".in_proj_b", ".mlp.gate", ".shared_expert_gate")
EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)")


@dataclass(frozen=True, slots=True)
class Note:
    """One fault.

    Attributes:
        repair: The id of the repair that found it.
        where: The tensor, module, field or file.
        found: What is there.
        remedy: What is done about it; for a fault that cannot be mended, what would be needed.
    """

    repair: str
    where: str
    found: str
    remedy: str


@dataclass
class Draft:
    """The checkpoint to be, and what was noted on the way.

    Attributes:
        found: The checkpoint as it is.
        source: The BF16 checkpoint it was made from, when given.
        head: Where the MTP head is to come from, when given.
        renew_metadata: Write shards anew whose `__metadata__` lacks the format.
        unlist: What becomes of a module that is listed as quantized and stored BF16: unlisted, or (False) quantized.
        tensors: Output tensor -> its one origin.
        held: Further copies (name, shard) that stay because nobody knows which one is right.
        suspect: Modules whose stored tensors cannot be trusted.
        config: config.json.
        twin: hf_quant_config.json.
        side_files: Files to bring in: name -> where from.
        removed: Files to leave out.
        mended: Faults that are mended.
        unmended: Faults that are not.
    """

    found: Found
    source: Checkpoint | None = None
    head: Checkpoint | None = None
    renew_metadata: bool = True
    unlist: bool = False
    tensors: dict[str, Origin] = field(default_factory=dict)
    held: set[tuple[str, str]] = field(default_factory=set)
    suspect: set[str] = field(default_factory=set)
    config: dict[str, Any] = field(default_factory=dict)
    twin: dict[str, Any] = field(default_factory=dict)
    side_files: dict[str, Path] = field(default_factory=dict)
    removed: set[str] = field(default_factory=set)
    mended: list[Note] = field(default_factory=list)
    unmended: list[Note] = field(default_factory=list)
    repair: str = ""  # the id of the repair at work

    @classmethod
    def of(cls, found: Found, **options: Any) -> "Draft":
        """A draft that is what was found: of a tensor stored twice, the copy that the index names, or the first."""
        tensors: dict[str, Origin] = {n: Stored(found.path_of(c[0]), c[0]) for n, c in found.copies.items()}
        for name, file in found.weight_map.items():
            for tensor in found.copies.get(name, ()):
                if tensor.shard == file:
                    tensors[name] = Stored(found.path_of(tensor), tensor)
        config, twin = copy.deepcopy(dict(found.config or {})), copy.deepcopy(dict(found.twin or {}))
        return cls(found, tensors=tensors, config=config, twin=twin, **options)

    def mend(self, where: str, found: str, remedy: str) -> None:
        """Notes a fault that this draft mends."""
        self.mended.append(Note(self.repair, where, found, remedy))

    def cannot(self, where: str, found: str, needed: str) -> None:
        """Notes a fault that stays."""
        self.unmended.append(Note(self.repair, where, found, needed))

    @functools.cached_property
    def architecture(self) -> Architecture:
        """What config.json and the tensor names imply.

        Raises:
            ConfigError: config.json is not one of this family.
        """
        return read_architecture(self.config, self.tensors)

    @property
    def text(self) -> dict[str, Any]:
        """config.json's text_config, or the whole of it in a text-only checkpoint."""
        inner = self.config.get("text_config")
        return inner if isinstance(inner, dict) else self.config

    @property
    def quantization(self) -> dict[str, Any]:
        """config.json's `quantization_config`, or an empty object."""
        value = self.config.get("quantization_config")
        return value if isinstance(value, dict) else {}

    @property
    def twin_quantization(self) -> dict[str, Any]:
        """hf_quant_config.json's `quantization`, or an empty object."""
        value = self.twin.get("quantization")
        return value if isinstance(value, dict) else {}

    def listed(self, module: str) -> str | None:
        """The scheme that either config lists for a module; config.json goes first, since vLLM reads that."""
        for place in (self.quantization, self.twin_quantization):
            layers = place.get("quantized_layers")
            for key in (module, experts_container(module)):
                entry = layers.get(key) if isinstance(layers, dict) else None
                if isinstance(entry, dict) and entry.get("quant_algo") in SCHEMES:
                    return str(entry["quant_algo"])
        return None

    def dtype(self, name: str) -> str | None:
        """The dtype that an output tensor will have; None when there is none."""
        spec = self.spec(name)
        return spec.dtype if spec else None

    def spec(self, name: str) -> Any:
        """The output tensor's name, dtype and shape; None when there is none."""
        origin = self.tensors.get(name)
        if origin is None:
            return None
        return origin.spec(name) if isinstance(origin, Stored) else next(s for s in origin.specs if s.name == name)

    def scheme(self, module: str) -> str | None:
        """How the module will be stored: `W4A16_NVFP4` for a packed weight, `FP8`, or None for any other."""
        return {"U8": W4A16_NVFP4, "F8_E4M3": FP8}.get(self.dtype(f"{module}.weight") or "")

    def place(self, computation: Computation) -> None:
        """Puts a computed module in the place of what is stored of it."""
        module = computation.specs[0].name.removesuffix(".weight")
        input_scale = self.tensors.get(f"{module}.input_scale")
        for leaf in ("weight", *COMPANIONS):
            self.tensors.pop(f"{module}.{leaf}", None)
        self.tensors |= {spec.name: computation for spec in computation.specs}
        if self.scheme(module) == FP8 and input_scale is not None:
            self.tensors[f"{module}.input_scale"] = input_scale

    def scalar(self, name: str) -> np.float32 | None:
        """The value of an F32 tensor of one element, a tensor scale say; None where there is no such tensor."""
        origin = self.tensors.get(name)
        if origin is not None and not isinstance(origin, Stored):
            return origin.scale
        if origin is None or origin.tensor.dtype != "F32" or origin.tensor.nbytes != 4:
            return None
        return np.float32(np.frombuffer(origin.read(), "<f4")[0])

    def group(self, module: str) -> tuple[str, ...]:
        """The module and those that vLLM fuses with it, as far as the model has them."""
        return tuple(m for m in fused_group(module) if m in self.modules) or (module,)

    @functools.cached_property
    def modules(self) -> Mapping[str, tuple[int, ...]]:
        """Every matrix of the decoder that may be quantized: name and shape [N, K]."""
        return {m: s for m, s in self.architecture.linear_modules.items() if not m.endswith(NEVER_QUANTIZED)}

    def settle(self) -> None:
        """To be called after a change of config.json or of names: what they imply is worked out anew."""
        self.__dict__.pop("architecture", None)
        self.__dict__.pop("modules", None)

    def source_weight(self, module: str) -> Stored | None:
        """The module's BF16 weight in the source."""
        if self.source is None:
            return None
        source = self.source
        return plain_weight(
            module, {n: Stored(source.path_of(source[n]), source[n]) for n in weight_names(module) if n in source}
        )

    def own_weight(self, module: str) -> Stored | None:
        """The module's BF16 weight as this checkpoint stores it."""
        stored = {n: self.tensors[n] for n in weight_names(module) if n in self.tensors}
        return plain_weight(module, {n: o for n, o in stored.items() if isinstance(o, Stored)})


def weight_names(module: str) -> Iterator[str]:
    """Where a module's weight may lie: under its own name, or in its layer's fused experts."""
    yield f"{module}.weight"
    if fused := fused_experts(module):
        yield fused


def plain_weight(module: str, stored: Mapping[str, Stored]) -> Stored | None:
    """A module's BF16 matrix [N, K]; an expert's is cut out of its layer's fused tensor.

    `gate_up_proj` [E, 2I, K] holds an expert's gate in its first I rows (transformers 5.14 qwen3_5_moe
    `Qwen3_5MoeExperts.forward`, modelopt 0.47 torch/export/moe_utils.py `_export_fused_experts`).
    """
    own = stored.get(f"{module}.weight")
    if own is not None:
        return own if own.tensor.dtype == "BF16" and len(own.tensor.shape) == 2 else None
    match = EXPERT.fullmatch(module)
    fused = next((o for n, o in stored.items() if not n.endswith(".weight")), None)
    if match is None or fused is None or fused.tensor.dtype != "BF16" or len(fused.tensor.shape) != 3:
        return None
    if int(match[2]) >= fused.tensor.shape[0]:
        return None
    matrix = fused.expert(int(match[2]))
    if match[3] == "down_proj":
        return matrix
    half = matrix.tensor.shape[0] // 2
    return matrix.rows(0, half) if match[3] == "gate_proj" else matrix.rows(half, 2 * half)


def same_bytes(one: Stored, other: Stored) -> bool:
    """Whether two stored tensors have the same dtype, shape and bytes. Stops reading at the first difference."""
    if (one.tensor.dtype, one.tensor.shape) != (other.tensor.dtype, other.tensor.shape):
        return False
    pairs: Iterable[tuple[bytes, bytes]] = zip(
        read_chunks(one.path, one.tensor), read_chunks(other.path, other.tensor), strict=True
    )
    return all(a == b for a, b in pairs)


def describe(tensor: TensorInfo | None) -> str:
    """A tensor's dtype and shape, for a sentence."""
    return f"{tensor.dtype} {list(tensor.shape)}" if tensor else "absent"
