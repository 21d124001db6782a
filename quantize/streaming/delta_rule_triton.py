"""One kernel in place of 190: the forward substitution of the gated delta rule, on a GPU.

Every number is computed by the operations of `delta_rule`, in the order in which PyTorch's reduction adds them up: four
accumulators that take turns (ATen/native/cuda/Reduce.cuh `thread_reduce_impl`, torch 2.11). Nothing is fused into one rounding.
Triton compiles it on first use; `available` says whether it does here, and with the same bits.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

CHUNK = 64
WARPS = 2

Inverse = Callable[[Tensor, Tensor], Tensor]


@cache
def available(device: torch.device, reference: Inverse) -> bool:
    """Whether `inverse` gives what `reference` does. It does not where Triton is missing, or finds no C compiler."""
    generator = torch.Generator().manual_seed(0)
    products = torch.randn((2, 3, 2, CHUNK, CHUNK), generator=generator).mul_(0.3).to(device)
    decay = torch.rand(products.shape, generator=generator).to(device)
    try:
        made = inverse(products.clone(), decay)
    except Exception:
        return False
    return torch.equal(made, reference(products, decay))


def inverse(products: Tensor, decay: Tensor) -> Tensor:
    """The inverse of 1 + the part of products x decay below the diagonal.

    Args:
        products: float32 [..., 64, 64], contiguous; overwritten with the result.
        decay: The same.
    """
    _kernel()[(products.numel() // CHUNK**2,)](products, decay, SIZE=CHUNK, num_warps=WARPS, enable_fp_fusion=False)
    return products


@cache
def _kernel() -> Any:
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator]
    def kernel(products, decay, SIZE: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
        column = tl.arange(0, SIZE)
        products += tl.program_id(0) * SIZE * SIZE
        decay += tl.program_id(0) * SIZE * SIZE
        for i in range(SIZE):
            below = column < i
            product = tl.load(products + i * SIZE + column) * tl.load(decay + i * SIZE + column)
            row = tl.where(below, product, 0.0) * -1.0
            tl.debug_barrier()
            tl.store(products + i * SIZE + column, row)
            tl.debug_barrier()  # every number of the row can be read by every thread
            sum0 = tl.zeros((SIZE,), tl.float32)
            sum1, sum2, sum3 = sum0, sum0, sum0
            for k in range(0, i, 4):
                at, above = products + i * SIZE + k, products + k * SIZE + column
                sum0 += tl.load(at) * tl.load(above)
                sum1 += tl.load(at + 1, mask=k + 1 < i, other=0.0) * tl.load(above + SIZE)
                sum2 += tl.load(at + 2, mask=k + 2 < i, other=0.0) * tl.load(above + 2 * SIZE)
                sum3 += tl.load(at + 3, mask=k + 3 < i, other=0.0) * tl.load(above + 3 * SIZE)
            tl.debug_barrier()  # and has been, before it changes
            tl.store(products + i * SIZE + column, tl.where(below, row + (sum0 + sum1 + sum2 + sum3), row))
        tl.debug_barrier()
        for i in range(SIZE):
            row = tl.load(products + i * SIZE + column)
            tl.store(products + i * SIZE + column, tl.where(column == i, 1.0, tl.where(column < i, row, 0.0)))

    return kernel
