"""Packs BF16 weights to NVFP4 and FP8 with the bytes that ModelOpt's exporter gives.

NVFP4 (see `assemble.formats` for the layout): a tensor scale is `amax / (6 * 448)`; each block of 16 weights has a scale in
E4M3, relative to the tensor scale; a weight becomes the nearest E2M1 code of what is left, ties to the even code.
The `max` recipe takes a block's scale from its largest weight, the `mse` recipe from `quantize.streaming.sweep`.

FP8: one scale a tensor, `amax / 448`; the quotient is rounded to BF16 first, as ModelOpt's division leaves it, then to E4M3.

ModelOpt's own functions (modelopt 0.47 torch/quantization/qtensor/nvfp4_tensor.py `NVFP4QTensor`, torch/export/quant_utils.py
`to_quantized_weight`) do the same steps over whole tensors, with 14 bytes of temporaries a weight. Here they go over a few
rows at a time, which stay in the processor's cache; tests hold the bytes against ModelOpt's.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from assemble.formats import BLOCK
from quantize.streaming.e2m1 import E2M1_MAX, E4M3_MAX, packed_codes
from quantize.streaming.spreading import for_each
from quantize.streaming.sweep import best_block_amax

E4M3_MIN = 2.0**-9  # ModelOpt lets no block scale be smaller, so none is zero
WEIGHTS_AT_ONCE = {"cpu": 1 << 18, "cuda": 1 << 24}  # on a CPU, little enough for the caches, enough to outweigh the calls


@dataclass(frozen=True)
class Packed:
    """A stack of S packed matrices [N, K].

    Attributes:
        weight: uint8 [S, N, K/2], two E2M1 codes a byte, the even column in the low four bits.
        weight_scale: float8_e4m3fn [S, N, K/16].
        weight_scale_2: float32 [S].
    """

    weight: Tensor
    weight_scale: Tensor
    weight_scale_2: Tensor


def amax(weight: Tensor) -> Tensor:
    """The largest magnitude in each of S BF16 tensors [S, ...]: float32 [S], NaN where there is one. In one pass."""
    if weight.is_cuda:
        return torch.stack([torch.linalg.vector_norm(matrix, torch.inf) for matrix in weight]).float()
    extremes = [torch.stack(torch.aminmax(matrix)) for matrix in weight]  # along a dimension it takes 20 times as long on a CPU
    return torch.stack(extremes).abs().amax(dim=1).float()


def pack_nvfp4(weight: Tensor, tensor_amax: Tensor, method: str) -> Packed:
    """Packs a BF16 stack [S, N, K].

    Args:
        weight: Contiguous.
        tensor_amax: float32 [S], positive: the largest magnitude, of the whole group where vLLM fuses several modules.
        method: `max` or `mse`.
    """
    stack, rows, columns = weight.shape
    made = Packed(
        torch.empty((stack, rows, columns // 2), dtype=torch.uint8, device=weight.device),
        torch.empty((stack, rows, columns // BLOCK), dtype=torch.float8_e4m3fn, device=weight.device),
        tensor_amax / (E2M1_MAX * E4M3_MAX),
    )
    flat, scales, codes = (t.view(stack * rows, -1) for t in (weight, made.weight_scale, made.weight))
    row_amax, row_scale = (t.repeat_interleave(rows).unsqueeze(1) for t in (tensor_amax, made.weight_scale_2))  # [S * N, 1]
    swept = best_block_amax(weight, tensor_amax).view(stack * rows, -1) if method == "mse" else None

    def pack(part: slice) -> None:
        blocks = flat[part].view(part.stop - part.start, -1, BLOCK)
        scale = _largest_scale(blocks, row_scale[part]) if swept is None else _static_scale(swept[part], row_amax[part])
        scales[part] = scale
        codes[part] = packed_codes(blocks / scale.float().mul_(row_scale[part]).unsqueeze(-1))

    for_each(pack, _parts(flat), weight.device)
    return made


def pack_fp8(weight: Tensor, tensor_amax: Tensor) -> tuple[Tensor, Tensor]:
    """Packs a BF16 matrix [N, K] whose largest magnitude is `tensor_amax`, float32 [].

    Returns:
        `weight` float8_e4m3fn [N, K] and `weight_scale` float32 [].
    """
    scale = tensor_amax / E4M3_MAX
    made = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)

    def pack(part: slice) -> None:
        made[part] = (weight[part] / scale).to(torch.float8_e4m3fn)

    for_each(pack, _parts(weight), weight.device)
    return made, scale


def _parts(flat: Tensor) -> Iterator[slice]:
    step = max(1, WEIGHTS_AT_ONCE[flat.device.type] // flat.shape[1])
    for start in range(0, flat.shape[0], step):
        yield slice(start, min(start + step, flat.shape[0]))


def _largest_scale(blocks: Tensor, row_scale: Tensor) -> Tensor:
    """Each block's scale from its largest weight, E4M3 [R, K/16]. The bits of a BF16 magnitude order as integers do."""
    block_amax = (blocks.view(torch.int16) & 0x7FFF).amax(dim=-1).view(torch.bfloat16).float()
    return _as_e4m3(block_amax / (E2M1_MAX * row_scale))


def _static_scale(block_amax: Tensor, tensor_amax: Tensor) -> Tensor:
    """The scale that a block's swept amax stands for. Source: `get_weights_scaling_factor_from_quantizer`, static path."""
    scale = block_amax / E2M1_MAX
    scale[scale == 0] = 1.0
    return _as_e4m3(scale * E4M3_MAX / (tensor_amax / E2M1_MAX))


def _as_e4m3(scale: Tensor) -> Tensor:
    return scale.masked_fill_(scale == 0, 1.0).clamp_(min=E4M3_MIN, max=E4M3_MAX).to(torch.float8_e4m3fn)
