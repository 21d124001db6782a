"""Rounding to E2M1, the four-bit float: sign, two bits of exponent, one of mantissa; magnitudes 0 0.5 1 1.5 2 3 4 6.

Codes 0 to 4 are steps of 0.5 from 0 to 2, codes 4 to 6 steps of 1 up to 4, code 7 is 6. So a magnitude is cut into what lies
in each of these three stretches, each part is rounded to its own step, ties to even, and the parts are added up: as numbers
of steps they give the code, as lengths the value.
"""

import torch
from torch import Tensor

E2M1_MAX, E4M3_MAX = 6.0, 448.0


def rounded(size: Tensor) -> Tensor:
    """The nearest E2M1 magnitudes of float32 magnitudes, ties to the even code; beyond 6 it is 6."""
    value = size.clamp(max=2).mul_(2).round_().mul_(0.5)
    value += size.clamp(min=2, max=4).round_()
    return value.add_(size.clamp(min=4, max=6).mul_(0.5).round_(), alpha=2).sub_(6)


def packed_codes(scaled: Tensor) -> Tensor:
    """Two codes a byte, uint8 [R, K/2], of scaled weights float32 [R, ..., 16] with K values a row; `scaled` is used up.

    The even column is in the low four bits. The fourth bit is the sign; a negative number that rounds to zero keeps it, a
    zero of either sign has none, as in ModelOpt 0.47 `NVFP4QTensor._cast_fp4`.
    """
    # As integers, negative numbers are negative, -0.0 the smallest, which has no opposite. (Comparisons cost four times as
    # much on a CPU, and so does a cast to uint8 beside one to int8.)
    negative = scaled.view(torch.int32).neg().clamp_(min=0, max=1).to(torch.int8)
    code = _magnitude_codes(scaled.abs_()).add_(negative, alpha=8)
    pairs = code.view(scaled.shape[0], -1).view(torch.int16)  # little-endian: the even column is the low byte
    return ((pairs >> 4) | pairs).to(torch.uint8)


def _magnitude_codes(size: Tensor) -> Tensor:
    """The codes 0 to 7, int8, of the same; `size` is used up. The last two stretches start at 2 steps each."""
    code = size.clamp(max=2).mul_(2).round_()
    code += size.clamp(min=2, max=4).round_()
    code += size.clamp_(min=4, max=6).mul_(0.5).round_()
    return code.to(torch.int8).sub_(4)
