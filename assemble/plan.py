"""An assembly plan: every tensor of the checkpoint to be, where it comes from, and which shard it goes to.

A plan is made from headers and configs alone, before a byte is written. Each output tensor has exactly one source:
it is quantized from a source weight, or copied byte for byte from the source or from the head's checkpoint.
Quantized tensors and copied ones go to shards of their own, so that each shard has one writer and is written once.
"""

import functools
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from assemble.architecture import LM_HEAD, MTP_PREFIX, VISION_PREFIX, Architecture, experts_container, source_tensor
from assemble.checkpoint import DTYPE_BYTES, Checkpoint, TensorInfo
from assemble.errors import InputError
from assemble.formats import TensorSpec, quantized_tensors
from assemble.splice import find_head

SHARD_NAME = re.compile(r"model-(\d{5})-of-(\d{5})\.safetensors")
_NUMBER = re.compile(r"(\d+)")
SCALE_SUFFIXES = (".weight_scale", ".weight_scale_2", ".weight_scale_inv", ".input_scale", ".weight_packed", ".qweight")


class PlanError(InputError):
    """A source that cannot become the checkpoint that was asked for."""


@dataclass(frozen=True)
class PlannedShard:
    """One shard to be: its name, its tensors in file order, and whether the quantizer or the copier writes it."""

    name: str
    tensors: tuple[TensorSpec, ...]
    quantized: bool

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes of tensor data."""
        return sum(t.nbytes for t in self.tensors)


@dataclass(frozen=True)
class AssemblyPlan:
    """The checkpoint to be.

    Attributes:
        source: The BF16 checkpoint.
        head: The checkpoint that the MTP head is copied from.
        architecture: What the source's config implies.
        schemes: Quantized module -> `FP8` or `W4A16_NVFP4`, routed experts one by one, in the model's order.
        left: Modules of the decoder that hold a matrix and stay unquantized.
        copies: Tensor name -> where its bytes come from.
        shards: All shards, named and numbered.
    """

    source: Checkpoint
    head: Checkpoint
    architecture: Architecture
    schemes: Mapping[str, str]
    left: tuple[str, ...]
    copies: Mapping[str, TensorInfo]
    shards: tuple[PlannedShard, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of tensor data in the checkpoint: the index's `total_size`."""
        return sum(shard.nbytes for shard in self.shards)

    @property
    def weight_map(self) -> dict[str, str]:
        """Tensor name -> shard name, by name."""
        return dict(sorted((t.name, s.name) for s in self.shards for t in s.tensors))

    @functools.cached_property
    def listed(self) -> dict[str, str]:
        """`schemes` as quantized_layers lists them: the routed experts of a layer once, by their container."""
        return {experts_container(module): scheme for module, scheme in self.schemes.items()}

    @property
    def counts(self) -> dict[str, int]:
        """Listed modules a scheme."""
        return dict(sorted(Counter(self.listed.values()).items()))

    def checkpoint_of(self, name: str) -> Checkpoint:
        """The checkpoint that the copied tensor `name` is read from."""
        return self.head if name.startswith(MTP_PREFIX) else self.source


def natural(name: str) -> list[Any]:
    """A sort key that puts layer 2 before layer 10: text and numbers in turn, text first, so that like meets like."""
    parts: list[Any] = _NUMBER.split(name)
    parts[1::2] = map(int, parts[1::2])
    return parts


def module_order(module: str) -> tuple[bool, list[Any]]:
    """The order in which a model holds its modules: decoder layers, then lm_head."""
    return (module == LM_HEAD, natural(module))


def plan_assembly(
    source: Checkpoint, head: Checkpoint, architecture: Architecture, schemes: Mapping[str, str], max_shard_bytes: int
) -> AssemblyPlan:
    """Plans the checkpoint.

    Args:
        source: The BF16 checkpoint.
        head: The checkpoint whose MTP head is taken; `source` itself unless it lost its own.
        architecture: Of `source`.
        schemes: Module name -> scheme, for every module that is to be quantized.
        max_shard_bytes: Tensor bytes a shard holds at most.

    Raises:
        PlanError: a tensor missing, unexpected, misshapen or not BF16; already quantized; a tied lm_head to quantize.
        HeadError: no usable MTP head.
        ShapeError: a weight that the scheme cannot hold.
    """
    _check_body(source, architecture, schemes)
    ordered = sorted(schemes, key=module_order)
    replaced = {source_tensor(module, source) for module in ordered}
    copies = {n: t for n, t in source.items() if not n.startswith(MTP_PREFIX) and n not in replaced}
    shapes = architecture.linear_modules
    quantized = [list(quantized_tensors(module, schemes[module], shapes[module])) for module in ordered]
    copies |= find_head(head, architecture)
    plain = [[TensorSpec(n, copies[n].dtype, copies[n].shape)] for n in sorted(copies, key=natural)]
    left = [m for m in architecture.linear_modules if m not in schemes]
    return AssemblyPlan(
        source,
        head,
        architecture,
        {m: schemes[m] for m in ordered},
        tuple(sorted(left, key=natural)),
        copies,
        _number(pack(quantized, max_shard_bytes), pack(plain, max_shard_bytes)),
    )


def _check_body(source: Checkpoint, architecture: Architecture, schemes: Mapping[str, str]) -> None:
    root = source.root
    scaled = [n for n in source if n.endswith(SCALE_SUFFIXES)]
    if source.config.get("quantization_config") or scaled:
        what = scaled[0] if scaled else "quantization_config in config.json"
        raise PlanError(f"{root} is already quantized ({what}). Give the BF16 checkpoint it was made from.")
    if architecture.tied and LM_HEAD in schemes:
        raise PlanError(
            f"{root} has tied embeddings (tie_word_embeddings: true), and the recipe quantizes lm_head: vLLM cannot load "
            "that. Untie the model first (store lm_head.weight and set the flag to false), or use a recipe that leaves lm_head."
        )
    expected = architecture.body_tensors
    if missing := [n for n in expected if n not in source]:
        raise PlanError(f"{root}: tensor {missing[0]} is missing ({len(missing)} missing in all).")
    vision = [n for n in source if n.startswith(VISION_PREFIX)]
    if architecture.wrapped and not vision:
        raise PlanError(f"{root}: config.json has a vision tower, but there is no tensor named {VISION_PREFIX}*")
    known = expected.keys() | (set(vision) if architecture.wrapped else set())
    if extra := [n for n in source if n not in known and not n.startswith(MTP_PREFIX)]:
        raise PlanError(f"{root}: unexpected tensor {extra[0]} ({len(extra)} in all): vLLM would refuse to load it.")
    for name, shape in expected.items():
        if source[name].shape != shape:
            raise PlanError(f"{root}: {name} has shape {list(source[name].shape)}, config.json implies {list(shape)}")
    for name in {source_tensor(module, source) for module in schemes}:
        if source[name].dtype != "BF16":
            raise PlanError(f"{root}: {name} is {source[name].dtype}; only a BF16 checkpoint can be quantized.")


def pack(groups: Iterable[list[TensorSpec]], max_bytes: int) -> list[list[TensorSpec]]:
    """Fills shards in order, greedily; a group (one module's tensors) is never split over two shards."""
    shards: list[list[TensorSpec]] = []
    room = 0
    for group in groups:
        size = sum(t.nbytes for t in group)
        if not shards or size > room:
            shards.append([])
            room = max_bytes
        shards[-1] += group
        room -= size
    return shards


def _number(quantized: list[list[TensorSpec]], plain: list[list[TensorSpec]]) -> tuple[PlannedShard, ...]:
    total = len(quantized) + len(plain)
    ordered = [*map(scalars_last, quantized), *(tuple(sorted(tensors, key=file_order)) for tensors in plain)]
    return tuple(PlannedShard(shard_name(i, total), t, i <= len(quantized)) for i, t in enumerate(ordered, 1))


def shard_name(number: int, total: int) -> str:
    """The name of shard `number` (from 1) of `total`."""
    return f"model-{number:05d}-of-{total:05d}.safetensors"


def scalars_last(tensors: Iterable[TensorSpec]) -> tuple[TensorSpec, ...]:
    """Quantized tensors in file order: matrices in the order in which they are made, then the scalars.

    So a shard can be hashed while it is written: all scalars are known only at its end. Where the matrices' bytes would
    leave the scalars unaligned (no real model's do), the scalars come first.
    """
    matrices: list[TensorSpec] = []
    scalars: list[TensorSpec] = []
    for tensor in tensors:
        (matrices if DTYPE_BYTES[tensor.dtype] == 1 else scalars).append(tensor)
    aligned = sum(t.nbytes for t in matrices) % DTYPE_BYTES["F32"] == 0
    return tuple(matrices + scalars if aligned else scalars + matrices)


def file_order(tensor: TensorSpec) -> tuple[int, list[Any]]:
    """Order inside a file: wider dtypes first, so that every tensor is aligned to its dtype, then by name."""
    return (-DTYPE_BYTES[tensor.dtype], natural(tensor.name))
