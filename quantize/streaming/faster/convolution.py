"""The causal convolution of linear attention on a GPU, with PyTorch's bits.

Without the library causal-conv1d, transformers lets PyTorch convolve, which wants each channel's tokens side by side and gets
them by a copy. The kernel takes them as they lie. A layer calls what its attribute `causal_conv1d_fn` holds, unless it is None.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

ATTRIBUTE = "causal_conv1d_fn"

_same: dict[tuple[Any, ...], bool] = {}  # shape and device -> whether the kernel has PyTorch's bits there


def installed(layer: nn.Module, device: torch.device) -> nn.Module:
    """The layer, its convolution computed by `causal_conv1d` where PyTorch's would be.

    Not where a layer has as many value heads as key heads: it uses what comes out of the convolution as it lies there, and
    sums up in another order then.
    """
    parts: list[Any] = [part for part in layer.modules() if getattr(part, ATTRIBUTE, part) is None]
    for part in parts if device.type == "cuda" else ():
        if part.conv1d.bias is None and part.activation == "silu" and part.num_v_heads > part.num_k_heads:
            setattr(part, ATTRIBUTE, causal_conv1d)
    return layer


def causal_conv1d(x: Tensor, weight: Tensor, bias: None = None, activation: str = "silu", **_: object) -> Tensor:
    """BF16 [B, C, T]: x [B, C, T] convolved with weight [C, taps], and SiLU. The signature is that of causal-conv1d.

    PyTorch chooses a convolution by the shape, so each shape is computed both ways the first time.
    """
    if bias is not None or activation != "silu":
        raise NotImplementedError("a bias, or another activation")
    case = (*x.shape, x.device)
    if case not in _same:
        expected = _by_pytorch(x, weight)
        _same[case] = _equal(expected, x, weight)
        return expected
    return _by_kernel(x, weight) if _same[case] else _by_pytorch(x, weight)


def _by_pytorch(x: Tensor, weight: Tensor) -> Tensor:
    """As `Qwen3_5GatedDeltaNet.forward` does it, transformers 5.14."""
    channels, taps = weight.shape
    made = functional.conv1d(x, weight.unsqueeze(1), padding=taps - 1, groups=channels)
    return functional.silu(made[:, :, : x.shape[-1]])


def _by_kernel(x: Tensor, weight: Tensor) -> Tensor:
    from quantize.streaming.faster import kernels

    return functional.silu(kernels.convolution(x, weight))


def _equal(expected: Tensor, x: Tensor, weight: Tensor) -> bool:
    try:
        return torch.equal(_by_kernel(x, weight), expected)
    except torch.OutOfMemoryError:
        raise  # of this moment only
    except Exception:
        return False
