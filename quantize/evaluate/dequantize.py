"""The two number formats again, for tensors: what was written becomes BF16, on whatever device the tensors are.

`assemble.formats` teaches the formats and is the reference; this is the same arithmetic for torch, over any leading
dimensions, so that the experts of a layer are read back in one go. A test holds the two against each other, against
compressed-tensors and against ModelOpt.

Besides, the other way for what a server quantizes while it runs: activations and the KV cache become E4M3 and come back.
"""

from typing import Any

from assemble.dequantize import E2M1
from assemble.formats import BLOCK

E4M3_MAX = 448.0


def dequantize_nvfp4(packed: Any, block_scale: Any, tensor_scale: Any) -> Any:
    """The float32 weight [..., N, K] of an NVFP4 triple.

    Args:
        packed: `weight`, uint8 [..., N, K/2]; the even element is the low nibble.
        block_scale: `weight_scale`, float8_e4m3fn [..., N, K/16].
        tensor_scale: `weight_scale_2`, float32, one a matrix: [] or [...].
    """
    import torch

    table = torch.from_numpy(E2M1).to(packed.device)
    pairs = torch.stack((packed & 15, packed >> 4), dim=-1)
    values: Any = table[pairs.flatten(-2).int()]
    scale = block_scale.float() * tensor_scale.float()[..., None, None]
    return (values.unflatten(-1, (-1, BLOCK)) * scale[..., None]).flatten(-2)


def dequantize_fp8(codes: Any, scale: Any) -> Any:
    """The float32 weight [..., N, K] of E4M3 codes (float8_e4m3fn) and their scale (float32, one a matrix)."""
    return codes.float() * scale.float().reshape(scale.shape + (1,) * (codes.dim() - scale.dim()))


def to_e4m3(values: Any, scale: Any) -> Any:
    """E4M3 codes (float8_e4m3fn) of `values / scale`, with what lies beyond ±448 clamped to it.

    As vLLM does it for a static scale: a float32 product with the scale's reciprocal, a clamp, a cast (vLLM 0.32
    model_executor/layers/quantization/input_quant_fp8.py `QuantFP8.forward_native`).
    """
    import torch

    scaled = values.float() * (1.0 / torch.as_tensor(scale, dtype=torch.float32, device=values.device))
    return scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def round_fp8(values: Any, scale: Any) -> Any:
    """What is left of values after E4M3 with this scale: same shape and dtype."""
    import torch

    scale = torch.as_tensor(scale, dtype=torch.float32, device=values.device)
    return (to_e4m3(values, scale).float() * scale).to(values.dtype)
