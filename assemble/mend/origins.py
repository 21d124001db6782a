"""Where the bytes of an output tensor come from: they lie in a file, or are computed from bytes that do.

A computation makes all the tensors of one module in one pass over its input, a few rows at a time, so memory stays
bounded whatever the module's size.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np

from assemble.checkpoint import TensorInfo
from assemble.dequantize import E4M3, dequantize_nvfp4
from assemble.formats import FP8, W4A16_NVFP4, TensorSpec, quantized_tensors
from assemble.nvfp4 import (
    E4M3_MAX,
    SMALLEST_BLOCK_SCALE,
    Float32,
    Packed,
    encode,
    fp8_rows,
    from_bf16,
    quantize_rows,
    row_chunks,
)
from assemble.writer import read_chunks

Emit = Callable[[str, bytes, int], None]  # tensor name, bytes, offset in the tensor


@dataclass(frozen=True)
class Stored:
    """Bytes that lie in a file.

    Attributes:
        path: The file.
        tensor: Where in it; for a slice of a larger tensor, the slice's own start, size and shape.
    """

    path: Path
    tensor: TensorInfo

    def spec(self, name: str) -> TensorSpec:
        """As an output tensor called `name`."""
        return TensorSpec(name, self.tensor.dtype, self.tensor.shape)

    def read(self) -> bytes:
        """All its bytes; for small tensors."""
        return b"".join(read_chunks(self.path, self.tensor))

    def rows(self, first: int, last: int) -> "Stored":
        """Entries [first, last) of the first dimension."""
        tensor = self.tensor
        stride = tensor.nbytes // tensor.shape[0]
        shape = (last - first, *tensor.shape[1:])
        start, nbytes = tensor.start + first * stride, (last - first) * stride
        return Stored(self.path, msgspec.structs.replace(tensor, shape=shape, start=start, nbytes=nbytes))

    def expert(self, number: int) -> "Stored":
        """One matrix [N, K] of a fused tensor [E, N, K]."""
        one = self.rows(number, number + 1)
        return Stored(one.path, msgspec.structs.replace(one.tensor, shape=one.tensor.shape[1:]))

    def bf16_rows(self) -> Iterator[Float32]:
        """A BF16 matrix as float32, a chunk of rows at a time."""
        rows, columns = self.tensor.shape
        for first, last in row_chunks(rows, columns):
            yield from_bf16(self.rows(first, last).read(), columns)


class Computation(Protocol):
    """The tensors of one module, computed."""

    @property
    def scale(self) -> np.float32:
        """The tensor scale that it encodes with."""
        ...

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """The tensors it makes."""
        ...

    @property
    def inputs(self) -> Iterable[Stored]:
        """What it reads."""
        ...

    def write(self, emit: Emit) -> str:
        """Makes them, piece by piece. Returns what is to be said about the result, or nothing."""
        ...


Origin = Stored | Computation


@dataclass(frozen=True)
class NVFP4FromBF16:
    """A module's NVFP4 tensors, from its BF16 weight and the tensor scale (its fused group's), with ModelOpt's numerics."""

    module: str
    weight: Stored
    scale: np.float32

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Weight, block scales, tensor scale."""
        return quantized_tensors(self.module, W4A16_NVFP4, self.weight.tensor.shape)

    @property
    def inputs(self) -> Iterable[Stored]:
        """The weight."""
        return (self.weight,)

    def write(self, emit: Emit) -> str:
        """Quantizes a chunk of rows at a time."""
        writer = _ModuleWriter(self.module, emit)
        for rows in self.weight.bf16_rows():
            writer.add(quantize_rows(rows, self.scale))
        writer.finish(self.scale)
        return ""


@dataclass(frozen=True)
class Rescaled:
    """A module's NVFP4 tensors, moved to a larger tensor scale: block scales and elements are rounded anew.

    The tensor scale is its fused group's; the other member keeps every byte. Each block scale is the old one times the
    ratio of the tensor scales, rounded to E4M3 (at most 1/16 off; more where it falls below 2^-6), and each element is
    encoded again, which takes back what it can of that. Zero block scales stay zero.
    """

    module: str
    weight: Stored
    weight_scale: Stored
    old: np.float32
    scale: np.float32

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Weight, block scales, tensor scale."""
        rows, half = self.weight.tensor.shape
        return quantized_tensors(self.module, W4A16_NVFP4, (rows, 2 * half))

    @property
    def inputs(self) -> Iterable[Stored]:
        """The packed weight and its block scales."""
        return self.weight, self.weight_scale

    def write(self, emit: Emit) -> str:
        """Re-encodes a chunk of rows at a time, and measures the error."""
        writer, wrong, total = _ModuleWriter(self.module, emit), 0.0, 0.0
        rows, half = self.weight.tensor.shape
        for first, last in row_chunks(rows, 2 * half):
            packed = np.frombuffer(self.weight.rows(first, last).read(), np.uint8).reshape(-1, half)
            codes = np.frombuffer(self.weight_scale.rows(first, last).read(), np.uint8).reshape(len(packed), -1)
            before = dequantize_nvfp4(packed, codes, float(self.old))
            after = self._encode(before, codes)
            writer.add(after)
            difference = (dequantize_nvfp4(after.weight, after.weight_scale, float(self.scale)) - before).astype(np.float64)
            wrong += float(np.sum(difference**2))
            total += float(np.sum(before.astype(np.float64) ** 2))
        writer.finish(self.scale)
        return f"{self.module}: weights changed by {100 * (wrong / total) ** 0.5 if total else 0:.3g} % (root mean square)"

    def _encode(self, values: Float32, codes: np.ndarray) -> Packed:
        ideal = E4M3[codes] * self.old / self.scale
        scale = np.clip(ideal, SMALLEST_BLOCK_SCALE, E4M3_MAX)
        result = encode(values, scale, self.scale)
        zero = codes & 0x7F == 0
        return Packed(result.weight, np.where(zero, codes, result.weight_scale))


@dataclass(frozen=True)
class FP8FromBF16:
    """A module's FP8 weight and weight scale, from its BF16 weight, with ModelOpt's numerics. The input scale is not here."""

    module: str
    weight: Stored
    scale: np.float32

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Weight and weight scale."""
        return quantized_tensors(self.module, FP8, self.weight.tensor.shape)[:2]

    @property
    def inputs(self) -> Iterable[Stored]:
        """The weight."""
        return (self.weight,)

    def write(self, emit: Emit) -> str:
        """Quantizes a chunk of rows at a time."""
        offset = 0
        for rows in self.weight.bf16_rows():
            emit(f"{self.module}.weight", fp8_rows(rows, self.scale).tobytes(), offset)
            offset += rows.size
        emit(f"{self.module}.weight_scale", self.scale.tobytes(), 0)
        return ""


class _ModuleWriter:
    """Emits an NVFP4 module's tensors as its rows come."""

    def __init__(self, module: str, emit: Emit) -> None:
        self._module, self._emit = module, emit
        self._weight = self._scale = 0

    def add(self, rows: Packed) -> None:
        self._emit(f"{self._module}.weight", rows.weight.tobytes(), self._weight)
        self._emit(f"{self._module}.weight_scale", rows.weight_scale.tobytes(), self._scale)
        self._weight += rows.weight.size
        self._scale += rows.weight_scale.size

    def finish(self, scale: np.float32) -> None:
        self._emit(f"{self._module}.weight_scale_2", np.float32(scale).tobytes(), 0)
