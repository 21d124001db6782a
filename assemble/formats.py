"""The two number formats of a quantized checkpoint: how they lie in a file, and how to read them back.

NVFP4, weight-only (`W4A16_NVFP4`). A weight [N, K] is cut along K into blocks of 16. Each element is an E2M1 number
(sign, two exponent bits, one mantissa bit: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, -0 among them); each block
has a scale in E4M3; the tensor has a scale in F32. The value is `e2m1 * block scale * tensor scale`. In the file:

    weight          U8      [N, K/2]   two elements a byte, the even one in the low nibble
    weight_scale    F8_E4M3 [N, K/16]  one block each
    weight_scale_2  F32     []         the tensor's largest magnitude / (6 * 448)

FP8 (`FP8`, W8A8). Weight and activations are E4M3 (sign, four exponent bits, three mantissa bits; largest 448; no
infinity; 0x7f and 0xff are NaN), each with one F32 scale a tensor:

    weight          F8_E4M3 [N, K]
    weight_scale    F32     []         the tensor's largest magnitude / 448
    input_scale     F32     []         the calibrated largest input magnitude / 448

Sources: modelopt 0.47 torch/quantization/qtensor/nvfp4_tensor.py and torch/export/unified_export_hf.py
`_export_quantized_weight`; vLLM 0.33 model_executor/layers/quantization/modelopt.py.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from assemble.checkpoint import DTYPE_BYTES
from assemble.errors import InputError

FP8 = "FP8"
W4A16_NVFP4 = "W4A16_NVFP4"
NVFP4 = "NVFP4"  # W4A4: not this project's recipe, but published checkpoints of the family have it
SCHEMES = (FP8, W4A16_NVFP4)
BLOCK = 16
COMPANIONS = ("weight_scale", "weight_scale_2", "input_scale")
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)


class ShapeError(InputError):
    """A weight whose shape the format cannot hold."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor that is to be: its name, safetensors dtype and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


def quantized_tensors(module: str, scheme: str, shape: tuple[int, ...]) -> tuple[TensorSpec, ...]:
    """The tensors that a quantized weight [N, K] becomes.

    Args:
        module: Module name; the tensors are `module.weight` and its scales.
        scheme: `FP8`, `W4A16_NVFP4`, or `NVFP4`, which has an `input_scale` more.
        shape: The BF16 weight's shape, [N, K].

    Raises:
        ShapeError: not two-dimensional, or K not a multiple of 16 for NVFP4.
    """
    if len(shape) != 2:
        raise ShapeError(f"{module}.weight has shape {list(shape)}; {scheme} needs a matrix")
    rows, columns = shape
    if scheme == FP8:
        return (
            TensorSpec(f"{module}.weight", "F8_E4M3", shape),
            TensorSpec(f"{module}.weight_scale", "F32", ()),
            TensorSpec(f"{module}.input_scale", "F32", ()),
        )
    if columns % BLOCK:
        raise ShapeError(f"{module}.weight has {columns} columns; NVFP4 needs a multiple of {BLOCK}")
    packed = (
        TensorSpec(f"{module}.weight", "U8", (rows, columns // 2)),
        TensorSpec(f"{module}.weight_scale", "F8_E4M3", (rows, columns // BLOCK)),
        TensorSpec(f"{module}.weight_scale_2", "F32", ()),
    )
    return packed if scheme == W4A16_NVFP4 else (*packed, TensorSpec(f"{module}.input_scale", "F32", ()))


def layer_entry(scheme: str) -> dict[str, Any]:
    """The scheme as an entry of `quantized_layers` spells it."""
    return {"quant_algo": FP8} if scheme == FP8 else {"quant_algo": W4A16_NVFP4, "group_size": BLOCK}


def _e4m3_values() -> npt.NDArray[np.float32]:
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, (codes & 7).astype(np.float64)
    magnitude = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    magnitude[(codes & 127) == 127] = np.nan
    return np.where(codes < 128, magnitude, -magnitude).astype(np.float32)


E4M3 = _e4m3_values()


def unpack_e2m1(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """E2M1 values [N, K] of packed bytes [N, K/2]; the even element is the low nibble."""
    values = np.empty((*packed.shape[:-1], packed.shape[-1] * 2), dtype=np.float32)
    values[..., 0::2] = E2M1[packed & 15]
    values[..., 1::2] = E2M1[packed >> 4]
    return values


def dequantize_nvfp4(
    packed: npt.NDArray[np.uint8], block_scale: npt.NDArray[np.uint8], tensor_scale: float
) -> npt.NDArray[np.float32]:
    """The float32 weight [N, K] of an NVFP4 triple.

    Args:
        packed: `weight`, uint8 [N, K/2].
        block_scale: `weight_scale`, E4M3 codes as uint8 [N, K/16].
        tensor_scale: `weight_scale_2`.
    """
    scale = E4M3[block_scale] * np.float32(tensor_scale)
    return unpack_e2m1(packed) * np.repeat(scale, BLOCK, axis=-1)


def dequantize_fp8(codes: npt.NDArray[np.uint8], scale: float) -> npt.NDArray[np.float32]:
    """The float32 weight of E4M3 codes (uint8, any shape) and their one scale."""
    return E4M3[codes] * np.float32(scale)
