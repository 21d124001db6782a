"""Triton kernels for linear attention. Importing this file needs Triton, calling it a C compiler.

Every number is computed by PyTorch's operations, in PyTorch's order, and nothing is fused into one rounding: that is what lets
them stand in for it (see `quantize.streaming.faster`).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 64  # tokens, as in `delta_rule`
TOKENS, CHANNELS = 16, 256  # a program's part of a convolution


@triton.jit  # type: ignore[untyped-decorator]
def _inverse(products, decay, SIZE: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    column = tl.arange(0, SIZE)
    matrix = tl.program_id(0).to(tl.int64)
    products += matrix * SIZE * SIZE
    decay += matrix * SIZE * SIZE
    for i in range(SIZE):
        below = column < i
        product = tl.load(products + i * SIZE + column) * tl.load(decay + i * SIZE + column)
        row = tl.where(below, product, 0.0) * -1.0
        tl.debug_barrier()
        tl.store(products + i * SIZE + column, row)
        tl.debug_barrier()  # every number of the row can be read by every thread
        # Four accumulators that take turns: ATen/native/cuda/Reduce.cuh `thread_reduce_impl`, torch 2.11.
        sum0 = tl.zeros((SIZE,), tl.float32)
        sum1, sum2, sum3 = sum0, sum0, sum0
        for k in range(0, i, 4):
            at, above = products + i * SIZE + k, products + k * SIZE + column
            sum0 += tl.load(at) * tl.load(above)
            sum1 += tl.load(at + 1, mask=k + 1 < i, other=0.0) * tl.load(above + SIZE, mask=k + 1 < i, other=0.0)
            sum2 += tl.load(at + 2, mask=k + 2 < i, other=0.0) * tl.load(above + 2 * SIZE, mask=k + 2 < i, other=0.0)
            sum3 += tl.load(at + 3, mask=k + 3 < i, other=0.0) * tl.load(above + 3 * SIZE, mask=k + 3 < i, other=0.0)
        tl.debug_barrier()  # and has been, before it changes
        tl.store(products + i * SIZE + column, tl.where(below, row + (sum0 + sum1 + sum2 + sum3), row))
    tl.debug_barrier()
    for i in range(SIZE):
        row = tl.load(products + i * SIZE + column)
        tl.store(products + i * SIZE + column, tl.where(column == i, 1.0, tl.where(column < i, row, 0.0)))


def inverse(products: Tensor, decay: Tensor) -> Tensor:
    """The inverse of 1 + the part of products x decay below the diagonal.

    Args:
        products: float32 [..., 64, 64], contiguous; overwritten with the result.
        decay: The same.
    """
    _launch(_inverse, (products.numel() // CHUNK**2,), products, decay, SIZE=CHUNK, num_warps=1)
    return products


@triton.jit  # type: ignore[untyped-decorator]
def _scaled(  # type: ignore[no-untyped-def] # noqa: PLR0913, PLR0917
    source, factor, growth, plain, scaled, grown, tokens, heads,
    of_row, of_token, of_head, of_channel,
    SIZE: tl.constexpr, CHANNELS: tl.constexpr, PLAIN: tl.constexpr, GROWN: tl.constexpr,  # noqa: N803
):  # fmt: skip
    row, chunk = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(1)
    head = tl.program_id(0) % heads
    token, channel = chunk * SIZE + tl.arange(0, SIZE), tl.arange(0, CHANNELS)
    there = token < tokens
    places = row * of_row + token[:, None] * of_token + head * of_head + channel[None, :] * of_channel
    values = tl.load(source + places, mask=there[:, None], other=0.0).to(tl.float32)
    padded = tl.num_programs(1) * SIZE
    target = (tl.program_id(0).to(tl.int64) * padded + token[:, None]) * CHANNELS + channel[None, :]
    by = tl.load(factor + (row * tokens + token) * heads + head, mask=there, other=0.0).to(tl.float32)
    product = values * by[:, None]
    tl.store(scaled + target, product)
    if PLAIN:
        tl.store(plain + target, values)
    if GROWN:
        tl.store(grown + target, product * tl.load(growth + tl.program_id(0) * padded + token)[:, None])


def key_parts(key: Tensor, beta: Tensor, growth: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The key, the key x beta, and that x growth, in float32 [B, H, C, 64, Dk], zeros behind the last token.

    Args:
        key: [B, T, H, Dk], Dk a power of two.
        beta: [B, T, H], contiguous.
        growth: float32 [B, H, C, 64], contiguous.
    """
    made = [_chunked(key) for _ in range(3)]
    _scale(key, beta, growth, *made, PLAIN=True, GROWN=True)
    return made[0], made[1], made[2]


def times(x: Tensor, factor: Tensor | float) -> Tensor:
    """X times a number, or one for each token and head [B, T, H], in float32 [B, H, C, 64, D], zeros behind the last token."""
    made = _chunked(x)
    if isinstance(factor, float):
        factor = torch.full(x.shape[:3], factor, dtype=torch.float32, device=x.device)
    _scale(x, factor, made, made, made, made, PLAIN=False, GROWN=False)
    return made


def _scale(source: Tensor, factor: Tensor, growth: Tensor, *made: Tensor, **parts: bool) -> None:
    rows, tokens, heads, channels = source.shape
    grid = rows * heads, made[0].shape[2]
    sizes = {"SIZE": CHUNK, "CHANNELS": channels, "num_warps": 8}
    _launch(_scaled, grid, source, factor, growth, *made, tokens, heads, *source.stride(), **parts, **sizes)


def _chunked(like: Tensor) -> Tensor:
    rows, tokens, heads, channels = like.shape
    return torch.empty((rows, heads, -(-tokens // CHUNK), CHUNK, channels), dtype=torch.float32, device=like.device)


@triton.jit  # type: ignore[untyped-decorator]
def _convolution(  # type: ignore[no-untyped-def] # noqa: PLR0913, PLR0917
    source, weight, made, tokens, channels, of_row, of_channel, of_token,
    TAPS: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,  # noqa: N803
):  # fmt: skip
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)[:, None]
    channel = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    inside = (token < tokens) & (channel < channels)
    row = tl.program_id(0).to(tl.int64)
    sums = tl.zeros((TOKENS, CHANNELS), tl.float32)
    for tap in tl.static_range(TAPS):
        at = token + tap - (TAPS - 1)
        values = tl.load(source + row * of_row + channel * of_channel + at * of_token, mask=inside & (at >= 0), other=0.0)
        taps = tl.load(weight + channel * TAPS + tap, mask=channel < channels, other=0.0)
        sums += values.to(tl.float32) * taps.to(tl.float32)  # exact products of BF16 numbers, so only the sums round
    tl.store(made + (row * tokens + token) * channels + channel, sums.to(made.dtype.element_ty), mask=inside)


def convolution(x: Tensor, weight: Tensor) -> Tensor:
    """A causal convolution of each channel over the tokens, before its activation.

    Args:
        x: BF16 [B, C, T].
        weight: BF16 [C, taps], contiguous.

    Returns:
        BF16 [B, C, T], a view of a tensor whose channels lie next to each other.
    """
    rows, channels, tokens = x.shape
    made = torch.empty((rows, tokens, channels), dtype=x.dtype, device=x.device)
    grid = rows, triton.cdiv(tokens, TOKENS), triton.cdiv(channels, CHANNELS)
    sizes = {"TAPS": weight.shape[1], "TOKENS": TOKENS, "CHANNELS": CHANNELS}
    _launch(_convolution, grid, x, weight, made, tokens, channels, *x.stride(), **sizes)
    return made.transpose(1, 2)


def _launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **settings: Any) -> None:
    with torch.cuda.device_of(arguments[0]):  # type: ignore[no-untyped-call]
        kernel[grid](*arguments, **settings, enable_fp_fusion=False)
