"""One matrix of a checkpoint, or the same matrix of all experts of a layer, as it is stored; and how to read it back.

The first dimension is what large ones are cut along: rows of a matrix [N, K], experts of a stack [E, N, K].
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from assemble.errors import InputError
from assemble.formats import FP8, W4A16_NVFP4
from quantize.evaluate.dequantize import dequantize_fp8, dequantize_nvfp4, to_e4m3

PART_ELEMENTS = 32_000_000  # weights that are float32 at a time: 128 MB a copy, and a few copies


@dataclass(frozen=True)
class Matrix:
    """A stored matrix.

    Attributes:
        scheme: `FP8`, `W4A16_NVFP4`, `NVFP4`, or None: the values are in `weight` as they are.
        weight: [N, K] or [E, N, K]; for NVFP4 uint8 with half the columns.
        scale: FP8: float32 [] or [E], the tensor's. NVFP4: float8_e4m3fn, a block's.
        tensor_scale: NVFP4: float32 [] or [E].
        input_scale: float32 [] or [E], where there is one.
    """

    scheme: str | None
    weight: Any
    scale: Any = None
    tensor_scale: Any = None
    input_scale: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of its values."""
        *leading, columns = self.weight.shape
        return (*leading, columns * (2 if self.packed else 1))

    @property
    def packed(self) -> bool:
        """Whether it is 4-bit."""
        return self.scheme not in (None, FP8)

    @property
    def stacked(self) -> bool:
        """Whether it holds one matrix an expert."""
        return bool(self.weight.dim() == 3)

    def to(self, device: Any) -> "Matrix":
        """The same on another device."""
        parts = {name: getattr(self, name) for name in ("weight", "scale", "tensor_scale", "input_scale")}
        return replace(self, **{name: part.to(device) for name, part in parts.items() if part is not None})

    def parts(self) -> Iterator[tuple[int, "Matrix"]]:
        """It in pieces along the first dimension, each with the place of its beginning."""
        count, size = self.shape[0], max(1, self.weight[0].numel() * (2 if self.packed else 1))
        step = max(1, PART_ELEMENTS // size)
        for first in range(0, count, step):
            yield first, self._cut(first, first + step)

    def values(self) -> Any:
        """The float32 values: what the stored numbers mean, each module by its own scales."""
        if self.scheme is None:
            return self.weight.float()
        if self.scheme == FP8:
            return dequantize_fp8(self.weight, self.scale)
        return dequantize_nvfp4(self.weight, self.scale, self.tensor_scale)

    def bf16(self) -> Any:
        """The values rounded to BF16, dequantized a part at a time; a BF16 weight itself, without a copy."""
        import torch

        if self.weight.dtype == torch.bfloat16:
            return self.weight
        out = torch.empty(self.shape, dtype=torch.bfloat16, device=self.weight.device)
        for first, part in self.parts():
            out[first : first + len(part.weight)] = part.values()
        return out

    def served_with(self, scale: Any) -> "Matrix":
        """The same matrix where a server gives it another tensor scale: the one of its fused group.

        NVFP4: the bytes are used with that scale as they are, so a smaller own scale makes the values too large (vLLM 0.32
        modelopt.py, KNvfp4Static: `weight_scale_2.max()`). FP8: encoded again, by way of F16 (utils/w8a8_utils.py
        `requantize_with_max_scale`, `per_tensor_dequantize`).
        """
        if self.scheme == FP8:
            import torch

            return replace(self, weight=to_e4m3(self.weight.to(torch.float16) * self.scale, scale), scale=scale)
        return replace(self, tensor_scale=scale)

    def expert(self, number: int) -> "Matrix":
        """One expert of a stack, as a stack of one."""
        return self._cut(number, number + 1)

    def _cut(self, first: int, last: int) -> "Matrix":
        rows = slice(first, last)
        scalars = {"tensor_scale": self.tensor_scale, "input_scale": self.input_scale}
        if self.scheme == FP8:
            scalars["scale"] = self.scale
        cut = {n: s[rows] if s is not None and s.dim() else s for n, s in scalars.items()}
        if self.packed:
            cut["scale"] = self.scale[rows]
        return replace(self, weight=self.weight[rows], **cut)


def read_matrix(module: str, tensors: dict[str, Any], listed: str | None) -> Matrix:
    """A matrix from its module's tensors.

    Args:
        module: For messages.
        tensors: `weight` and what of `weight_scale`, `weight_scale_2` and `input_scale` there is.
        listed: The scheme that the config lists for the module; None when it lists none.

    Raises:
        InputError: quantized in a way that is not of this family's checkpoints.
    """
    import torch

    weight = tensors["weight"]
    if weight.dtype not in (torch.uint8, torch.float8_e4m3fn):
        return Matrix(None, weight)
    needed = ("weight_scale", "weight_scale_2") if weight.dtype == torch.uint8 else ("weight_scale",)
    for leaf in needed:
        if leaf not in tensors:
            raise InputError(
                f"{module} has a quantized weight and no {leaf}: there is nothing to read its values with. "
                "See: python -m assemble verify CHECKPOINT"
            )
    scale = tensors["weight_scale"]
    input_scale = _scalar(tensors.get("input_scale"))
    if weight.dtype == torch.float8_e4m3fn:
        if scale.numel() != 1:
            raise InputError(
                f"{module}.weight_scale has shape {list(scale.shape)}: FP8 here has one scale a tensor. "
                "FP8 by block or by channel is not a scheme that this tool reads."
            )
        return Matrix(FP8, weight, _scalar(scale), None, input_scale)
    return Matrix(listed or W4A16_NVFP4, weight, scale, _scalar(tensors["weight_scale_2"]), input_scale)


def stack(matrices: list[Matrix]) -> Matrix:
    """The matrices of a layer's experts as one."""
    import torch

    first = matrices[0]

    def together(name: str) -> Any:
        parts = [getattr(m, name) for m in matrices]
        return None if any(part is None for part in parts) else torch.stack(parts)

    names = ("weight", "scale", "tensor_scale", "input_scale")
    return Matrix(first.scheme, **{name: together(name) for name in names})


def _scalar(tensor: Any) -> Any:
    return None if tensor is None else tensor.float().reshape(())
