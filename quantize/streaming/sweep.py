"""The MSE sweep: for each block of 16 weights, the E4M3 scale with the smallest squared error.

A block's candidates are the 126 positive E4M3 numbers, as shares of the largest, 448, which stands for the largest weight of
the tensor. The first candidate with the smallest error wins. On a GPU ModelOpt's Triton kernel looks for it; on a CPU the
functions below do, in plain PyTorch. ModelOpt 0.47: torch/kernels/quantization/gemm/nvfp4_fp8_sweep.py and
`NVFP4MSECalibrator` in torch/quantization/calib/mse.py, whose result tests hold these against.
"""

import torch
from torch import Tensor

from assemble.formats import BLOCK
from quantize.streaming.e2m1 import E2M1_MAX, E4M3_MAX, rounded
from quantize.streaming.spreading import for_each

CPU_BLOCKS = 1 << 12  # swept at once: their intermediate results stay in the cache
MARGIN = 0.99  # for the rounding of the bound below


def best_block_amax(weight: Tensor, tensor_amax: Tensor) -> Tensor:
    """What each block's largest magnitude is taken for, so that its squared error is smallest.

    Args:
        weight: BF16 [S, N, K].
        tensor_amax: float32 [S], positive.

    Returns:
        float32 [S, N, K/16].
    """
    blocks = weight.view(weight.shape[0], -1, BLOCK)
    made = torch.empty(blocks.shape[:2], device=weight.device)
    for matrix, largest, best in zip(blocks, tensor_amax, made, strict=True):
        best[:] = _sweep(matrix, largest)
    return made.view(*weight.shape[:2], -1)


def _sweep(blocks: Tensor, tensor_amax: Tensor) -> Tensor:
    """float32 [n] for the blocks [n, 16] of one matrix."""
    if blocks.device.type == "cuda":
        from modelopt.torch.kernels.quantization.gemm import nvfp4_fp8_scale_sweep

        swept: Tensor = nvfp4_fp8_scale_sweep(blocks, tensor_amax, block_size=BLOCK)
        return swept
    best = torch.empty(len(blocks))

    def sweep(part: slice) -> None:
        best[part] = _sweep_on_cpu(blocks[part], tensor_amax)

    for_each(sweep, (slice(i, i + CPU_BLOCKS) for i in range(0, len(blocks), CPU_BLOCKS)), blocks.device)
    return best


def _sweep_on_cpu(blocks: Tensor, tensor_amax: Tensor) -> Tensor:
    shares = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float() / E4M3_MAX
    scales = shares * tensor_amax / E2M1_MAX
    size = blocks.float().abs()
    best_loss = torch.full((len(size),), torch.inf)
    best = torch.zeros(len(size), dtype=torch.int64)
    for number in range(_first_candidate(size, scales), len(scales)):
        loss = _loss(size, scales[number])
        better = loss < best_loss
        best_loss = torch.where(better, loss, best_loss)
        best[better] = number
    return tensor_amax * shares[best]


def _first_candidate(size: Tensor, scales: Tensor) -> int:
    """The candidates before this one are best for no block.

    A scale s represents nothing beyond 6 s, so it costs a block with largest weight `a` at least (a - 6 s) squared. If that
    is more than some other scale costs, here the smallest one that represents `a`, then s is not the best.
    """
    largest = size.amax(dim=1)
    enough = torch.searchsorted(scales * E2M1_MAX, largest).clamp(max=len(scales) - 1)
    bound = (largest - _loss(size, scales[enough].unsqueeze(1)).sqrt()) / E2M1_MAX * MARGIN
    return int(torch.searchsorted(scales, bound.min()))


def _loss(size: Tensor, scale: Tensor) -> Tensor:
    """The squared error [n] of blocks of magnitudes [n, 16] under a scale [] or [n, 1]."""
    return (size - rounded(size / scale) * scale).square_().sum(dim=1)
