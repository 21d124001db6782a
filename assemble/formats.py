"""The two number formats of a quantized checkpoint: how they lie in a file (and `assemble.dequantize` reads them back).

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
from typing import Any

import msgspec

from assemble.checkpoint import DTYPE_BYTES
from assemble.errors import InputError

FP8 = "FP8"
W4A16_NVFP4 = "W4A16_NVFP4"
NVFP4 = "NVFP4"  # W4A4: not this project's recipe, but published checkpoints of the family have it
SCHEMES = (FP8, W4A16_NVFP4)
BLOCK = 16
COMPANIONS = ("weight_scale", "weight_scale_2", "input_scale")


class ShapeError(InputError):
    """A weight whose shape the format cannot hold."""


class TensorSpec(msgspec.Struct, frozen=True, gc=False):
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
