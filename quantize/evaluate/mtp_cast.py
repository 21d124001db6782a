"""The head as others write it: its matrices rounded to FP8 or NVFP4, and read back."""

from collections.abc import Callable, Mapping
from typing import Any

from quantize.evaluate.dequantize import dequantize_fp8, dequantize_nvfp4

BYTES = {"FP8": 0.5, "NVFP4": 4.5 / 16}  # beside BF16
KEPT = ("mlp.gate.weight", "mlp.shared_expert_gate.weight")  # matrices of a head that nobody rounds: they choose experts


def cast_head(tensors: Mapping[str, Any], form: str) -> dict[str, Any]:
    """A head whose matrices are rounded to `FP8` (a scale a tensor) or `NVFP4`, in BF16 again; experts one by one.

    Rounded by what packs the body's. Weights only: a server that runs an FP8 head rounds its activations as well.
    """
    import torch

    with torch.inference_mode(mode=False):  # the mode is a thread's own, and packing spreads its work over threads
        return {name: CASTS[form](tensor) if _is_cast(name, tensor) else tensor for name, tensor in tensors.items()}


def _is_cast(name: str, tensor: Any) -> bool:
    return tensor.dim() >= 2 and not name.endswith(KEPT)


def _through_fp8(weight: Any) -> Any:
    import torch

    from quantize.streaming.packing import amax, pack_fp8

    stack = weight.contiguous().view(-1, *weight.shape[-2:])
    rounded = [dequantize_fp8(*pack_fp8(w, largest)) for w, largest in zip(stack, amax(stack), strict=True)]
    return torch.stack(rounded).view(weight.shape).to(weight.dtype)


def _through_nvfp4(weight: Any) -> Any:
    from quantize.streaming.packing import amax, pack_nvfp4

    stack = weight.contiguous().view(-1, *weight.shape[-2:])
    packed = pack_nvfp4(stack, amax(stack), "max")
    values = dequantize_nvfp4(packed.weight, packed.weight_scale, packed.weight_scale_2)
    return values.view(weight.shape).to(weight.dtype)


CASTS: dict[str, Callable[[Any], Any]] = {"FP8": _through_fp8, "NVFP4": _through_nvfp4}
