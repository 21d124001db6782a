"""The causal convolution of linear attention on a GPU, with PyTorch's bits.

Without the library causal-conv1d, transformers lets PyTorch convolve, which wants each channel's tokens side by side and gets
them by a copy. The kernel takes them as they lie. A layer calls what its attribute `causal_conv1d_fn` holds, unless it is None.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

ATTRIBUTE = "causal_conv1d_fn"

Convolution = Callable[..., Tensor]


def installed(layer: nn.Module, device: torch.device) -> nn.Module:
    """The layer, its convolution computed by a kernel where PyTorch's would be, and the bits are the same.

    Not where a layer has as many value heads as key heads: it uses what comes out of the convolution as it lies there, and
    sums up in another order then.
    """
    parts: list[Any] = [part for part in layer.modules() if getattr(part, ATTRIBUTE, part) is None]
    for part in parts if device.type == "cuda" else ():
        if part.conv1d.bias is None and part.activation == "silu" and part.num_v_heads > part.num_k_heads:
            setattr(part, ATTRIBUTE, same_convolution(part.conv1d.in_channels, part.conv_kernel_size, device))
    return layer


@cache
def same_convolution(channels: int, taps: int, device: torch.device) -> Convolution | None:
    """The kernel, if it computes on the device what PyTorch does for so many channels; compiles for a second."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((2, 131, channels), generator=generator).bfloat16().to(device).transpose(1, 2)
    weight = torch.randn((channels, taps), generator=generator).bfloat16().to(device)
    expected = functional.silu(functional.conv1d(x, weight.unsqueeze(1), padding=taps - 1, groups=channels)[..., : x.shape[2]])
    try:
        made = causal_conv1d(x, weight)
    except Exception:
        return None
    return causal_conv1d if torch.equal(made, expected) else None


def causal_conv1d(x: Tensor, weight: Tensor, bias: None = None, activation: str = "silu", **_: object) -> Tensor:
    """BF16 [B, C, T]: x [B, C, T] convolved with weight [C, taps], and SiLU. The signature is that of causal-conv1d."""
    from quantize.streaming.faster import kernels

    if bias is not None or activation != "silu":
        raise NotImplementedError("a bias, or another activation")
    return functional.silu(kernels.convolution(x, weight))
