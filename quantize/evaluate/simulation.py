"""What a server quantizes while it runs, simulated on a layer of transformers in BF16.

FP8 activations. The input of an FP8 matrix is multiplied by the reciprocal of its static scale, clamped to ±448 and
rounded to E4M3 (vLLM 0.32 model_executor/layers/quantization/input_quant_fp8.py, `QuantFP8.forward_native`). The product of
the rounded values and the weight is exact in both; here it is a BF16 product of the dequantized ones, so sums are rounded
elsewhere than in a server's FP8 kernel.

FP8 KV cache. Keys (after their norm and the rotary embedding) and values are divided by their scale, 1 where none is
stored, and rounded to E4M3 as they enter the cache (v1/attention/ops/triton_reshape_and_cache_flash.py,
`reshape_and_cache_kernel_flash`); attention reads them from there, the prompt's own tokens too.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quantize.evaluate.dequantize import E4M3_MAX, round_fp8

SIMULATED = "simulated_inputs"  # attribute of a layer: module name -> InputRounding
FP8_ACTIVATIONS = "FP8 activations of FP8 matrices: static scale, clamp to ±448, E4M3"
FP8_KV = "FP8 KV cache: keys after norm and rotary embedding, and values, in E4M3 with the stored scale (1 where none is)"
FUSED_SCALES = "the one scale that vLLM takes for matrices that it fuses (q/k/v, gate/up, in_proj_qkv/in_proj_z)"
NOT_SIMULATED = (
    "the kernels' order of summation: products of dequantized BF16 values stand for FP8 and Marlin kernels",
    "FP8 queries and attention weights, which some attention backends use beside an FP8 KV cache",
    "the precision of the Gated DeltaNet state (mamba cache dtype), batching, prefix caching, CUDA graphs",
)


@dataclass
class InputRounding:
    """The inputs of one FP8 matrix: rounds them, and keeps count while `recording`.

    Attributes:
        scale: The static scale, float32 [].
        recording: Whether to count.
        signal: Sum of squares of the inputs.
        noise: Sum of squares of what rounding changed.
        clipped: Inputs beyond ±448 times the scale.
        count: Inputs.
        largest: The largest input's magnitude.
    """

    scale: Any
    recording: bool = False
    signal: float = 0.0
    noise: float = 0.0
    clipped: int = 0
    count: int = 0
    largest: float = 0.0

    def __call__(self, _module: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """A forward pre-hook of a linear module."""
        values, *rest = inputs
        rounded = round_fp8(values, self.scale)
        if self.recording:
            self._record(values.float(), rounded.float())
        return (rounded, *rest)

    def _record(self, values: Any, rounded: Any) -> None:
        magnitude = values.abs()
        self.signal += float(values.square().sum())
        self.noise += float((values - rounded).square().sum())
        self.clipped += int((magnitude > E4M3_MAX * self.scale).sum())
        self.count += values.numel()
        self.largest = max(self.largest, float(magnitude.amax()))


class RoundingCache:
    """Stands before a transformers cache, or none, and rounds keys and values to E4M3 on their way in."""

    def __init__(self, inner: Any, k_scale: float, v_scale: float) -> None:
        self._inner, self._scales = inner, (k_scale, v_scale)

    def update(self, keys: Any, values: Any, *arguments: Any, **options: Any) -> tuple[Any, Any]:
        """What attention reads: keys and values as they are cached."""
        keys, values = round_fp8(keys, self._scales[0]), round_fp8(values, self._scales[1])
        return (keys, values) if self._inner is None else self._inner.update(keys, values, *arguments, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def simulate(layer: Any, input_scales: Mapping[str, Any], kv_scales: tuple[float, float] | None) -> None:
    """Hooks the simulation into a decoder layer, or into any module with the same names inside.

    Args:
        layer: A `torch.nn.Module`; changed.
        input_scales: Module name -> `input_scale` of each FP8 matrix; None where the file has none (then nothing is rounded).
        kv_scales: Scales of keys and values; None: the cache is not FP8.
    """
    roundings = {name: InputRounding(scale) for name, scale in input_scales.items() if scale is not None}
    for name, rounding in roundings.items():
        layer.get_submodule(name).register_forward_pre_hook(rounding)
    layer.__dict__[SIMULATED] = roundings
    attention = getattr(layer, "self_attn", None)
    if kv_scales is not None and attention is not None:
        attention.register_forward_pre_hook(lambda _m, a, k: (a, _rounding(k, kv_scales)), with_kwargs=True)


def _rounding(options: dict[str, Any], kv_scales: tuple[float, float]) -> dict[str, Any]:
    return options | {"past_key_values": RoundingCache(options.get("past_key_values"), *kv_scales)}


def inputs_of(layer: Any) -> dict[str, InputRounding]:
    """The roundings that `simulate` put into a layer, by module name."""
    found: dict[str, InputRounding] = layer.__dict__.get(SIMULATED, {})
    return found
