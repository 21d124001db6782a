"""Quantizes a BF16 weight to NVFP4 (or FP8) from file to bytes, with ModelOpt's numerics, without torch.

A repair needs this for a single module: an lm_head that was listed and left BF16, a gate and an up projection with
different tensor scales. The format is described in `assemble.formats`; this is the way there, for the `max` recipe:

1. The tensor scale: largest magnitude / (6 * 448), in float32. Members of a fused group share the group's largest.
2. A block's scale: largest magnitude of 16 / (6 * tensor scale), clamped to [2^-9, 448], rounded to E4M3. A block of
   zeros has scale 1 (38 in hexadecimal), not 0.
3. An element: value / (block scale * tensor scale), rounded to E2M1, the tie to the even code. A negative value that rounds
   to nothing keeps its sign (code 8, -0); -0 itself loses it (code 0).

Every step is one float32 operation, in the order of modelopt 0.47 torch/quantization/qtensor/nvfp4_tensor.py
(`get_weights_scaling_factor_2`, `get_weights_scaling_factor`, `_cast_per_block_scale_to_fp8`, `quantize`, `_cast_fp4`),
so the bytes are those of its exporter (torch/export/unified_export_hf.py `_export_quantized_weight`) on a CPU, which a test
holds them against. On a GPU torch divides by a constant as a product with its reciprocal (ATen native/cuda/
BinaryDivTrueKernel.cu), so the last bit of a tensor scale exported there may be another; that was not compared.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from assemble.dequantize import E4M3
from assemble.errors import InputError
from assemble.formats import BLOCK

E2M1_MAX = np.float32(6)
E4M3_MAX = np.float32(448)
SMALLEST_BLOCK_SCALE = np.float32(2.0**-9)  # E4M3's smallest positive number
CHUNK_ELEMENTS = 2 * 1024 * 1024  # elements quantized at a time: about 50 MB of intermediate float32

Float32 = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


class NumericError(InputError):
    """A weight that no scale can hold: NaN or infinity in it, or nothing but zeros."""


@dataclass(frozen=True)
class Packed:
    """Some rows of an NVFP4 weight: `weight` uint8 [n, K/2] and `weight_scale` E4M3 codes, uint8 [n, K/16]."""

    weight: Bytes
    weight_scale: Bytes


def from_bf16(data: bytes | memoryview, columns: int) -> Float32:
    """BF16 bytes (little-endian, row-major) as float32 [rows, columns]: BF16 is the upper half of a float32."""
    halves = np.frombuffer(data, "<u2").astype(np.uint32)
    return (halves << np.uint32(16)).view(np.float32).reshape(-1, columns)


def to_bf16(values: Float32) -> Float32:
    """Float32 values rounded to BF16, the tie to even; still float32. Finite values only."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32)


def to_e4m3(values: Float32) -> Bytes:
    """E4M3 codes of float32 values, rounded to the nearest, the tie to even.

    Beyond 448 it saturates, as torch 2.13 does in a cast to `float8_e4m3fn` (before, what rounds beyond 448 became NaN).
    """
    magnitude = np.abs(values)
    bits = magnitude.view(np.uint32)
    # Normal numbers: keep three bits of the mantissa, move the exponent's bias from 127 to 7.
    normal = ((bits + np.uint32(0x7FFFF) + ((bits >> np.uint32(20)) & np.uint32(1))) >> np.uint32(20)).astype(np.int64) - 960
    with np.errstate(over="ignore", invalid="ignore"):
        subnormal = np.rint(np.minimum(magnitude, np.float32(1)) * np.float32(512))  # steps of 2^-9; 8 of them are 2^-6
        wide = np.where(magnitude < np.float32(2.0**-6), subnormal, np.minimum(normal, 0x7E))
    codes: Bytes = np.where(np.isnan(magnitude), 0x7F, wide).astype(np.uint8)
    codes |= np.signbit(values).astype(np.uint8) << np.uint8(7)
    return codes


def to_e2m1(values: Float32) -> Bytes:
    """E2M1 codes, 0 to 15, of float32 values; a tie goes to the even code, beyond 6 to 6."""
    magnitude = np.abs(values)
    codes = (values < 0).astype(np.uint8) << np.uint8(3)
    for bound in (0.25, 1.25, 2.5, 5.0):  # the tie belongs to the code below
        codes += magnitude > np.float32(bound)
    for bound in (0.75, 1.75, 3.5):  # the tie belongs to the code above
        codes += magnitude >= np.float32(bound)
    return codes


def pack_e2m1(codes: Bytes) -> Bytes:
    """Two codes a byte, [n, K] -> [n, K/2]; the even element in the low nibble."""
    return (codes[..., 1::2] << np.uint8(4)) | codes[..., 0::2]


def amax(chunks: Iterable[Float32]) -> np.float32:
    """The largest magnitude of a weight that comes in pieces.

    Raises:
        NumericError: NaN or infinity, or zeros only.
    """
    largest = np.float32(0)
    for chunk in chunks:
        largest = np.maximum(largest, np.max(np.abs(chunk), initial=np.float32(0)))  # NaN stays NaN
    if not np.isfinite(largest) or largest == 0:
        raise NumericError(f"the weight's largest magnitude is {largest:g}: there is no scale for it")
    return np.float32(largest)


def tensor_scale(largest: np.float32) -> np.float32:
    """`weight_scale_2` for a weight, or a fused group, with this largest magnitude."""
    return np.float32(largest / (E2M1_MAX * E4M3_MAX))


def quantize_rows(rows: Float32, scale: np.float32) -> Packed:
    """Quantizes rows [n, K] of a weight whose tensor scale is known; K is a multiple of 16."""
    blocks = rows.reshape(len(rows), -1, BLOCK)
    with np.errstate(over="ignore"):  # a scale too small for the block: clipped to 448 below
        block_scale = np.abs(blocks).max(axis=-1) / (E2M1_MAX * scale)
    block_scale[block_scale == 0] = 1
    return encode(rows, np.clip(block_scale, SMALLEST_BLOCK_SCALE, E4M3_MAX), scale)


def encode(rows: Float32, block_scale: Float32, scale: np.float32) -> Packed:
    """Encodes rows [n, K] with block scales [n, K/16] (float32, from 0 to 448, rounded here) and a tensor scale."""
    codes = to_e4m3(block_scale)
    divisor = E4M3[codes] * scale
    with np.errstate(over="ignore"):
        scaled = rows.reshape(len(rows), -1, BLOCK) / divisor[..., None]
    return Packed(pack_e2m1(to_e2m1(scaled.reshape(rows.shape))), codes)


def fp8_scale(largest: np.float32) -> np.float32:
    """`weight_scale` of an FP8 weight with this largest magnitude."""
    return np.float32(largest / E4M3_MAX)


def fp8_rows(rows: Float32, scale: np.float32) -> Bytes:
    """FP8 codes of rows of a BF16 weight: torch divides BF16 by a scalar in float32, then rounds to BF16, then to E4M3."""
    return to_e4m3(to_bf16(rows / scale))


def row_chunks(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows [first, last) that are quantized together."""
    step = max(1, CHUNK_ELEMENTS // max(1, columns))
    for first in range(0, rows, step):
        yield first, min(first + step, rows)
