"""Packed bytes equal ModelOpt's, whatever the weights."""

from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from modelopt.torch.export.quant_utils import QUANTIZATION_FP8, to_quantized_weight
from modelopt.torch.quantization.calib.mse import NVFP4MSECalibrator
from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

from assemble.errors import InputError
from assemble.formats import FP8, W4A16_NVFP4
from quantize.streaming import packing, sweep
from quantize.streaming.modules import Packer
from quantize.streaming.packing import amax, pack_fp8, pack_nvfp4


def weights(shape: tuple[int, ...], seed: int, spread: float = 0.02) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * spread).bfloat16()


def any_bits(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Every kind of finite BF16: subnormals, zeros of both signs, the largest; no matrix without a positive magnitude."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.randint(-(2**15), 2**15, shape, generator=generator, dtype=torch.int16).view(torch.bfloat16)
    made = torch.where(made.isfinite(), made, torch.zeros_like(made)).clamp(-1e4, 1e4)
    made[..., 0, 0] = 1.0
    return made


def ties(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Multiples of 1/8 up to 6 in blocks whose scale is 1: every rounding boundary is met exactly."""
    generator = torch.Generator().manual_seed(seed)
    made = (torch.randint(-48, 49, shape, generator=generator).float() / 8).bfloat16()
    made[..., 0] = 6.0
    return made


def modelopt_nvfp4(weight: torch.Tensor, tensor_amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale_2 = tensor_amax / (6.0 * 448.0)
    scale, _ = NVFP4QTensor.get_weights_scaling_factor(weight, 16, scale_2)
    packed, _, _ = NVFP4QTensor.quantize(weight, 16, scale, scale_2)
    return packed._quantized_data, scale


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@settings(max_examples=30, deadline=None)
@given(
    make=st.sampled_from([weights, any_bits, ties]),
    seed=st.integers(0, 10**6),
    stack=st.integers(1, 3),
    rows=st.integers(1, 40),
    blocks=st.integers(1, 12),
)
def test_nvfp4_equals_modelopt(make, seed: int, stack: int, rows: int, blocks: int) -> None:  # type: ignore[no-untyped-def]
    weight = make((stack, rows, 16 * blocks), seed)
    made = pack_nvfp4(weight, amax(weight), "max")
    for i in range(stack):
        codes, scales = modelopt_nvfp4(weight[i], weight[i].abs().amax().float())
        assert same_bytes(made.weight[i], codes)
        assert same_bytes(made.weight_scale[i], scales)
        assert made.weight_scale_2[i] == weight[i].abs().amax().float() / 2688


def test_nvfp4_in_several_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = weights((3, 50, 64), 1)
    whole = pack_nvfp4(weight, amax(weight), "max")
    monkeypatch.setitem(packing.WEIGHTS_AT_ONCE, "cpu", 64 * 7)  # a part holds rows of two matrices
    parts = pack_nvfp4(weight, amax(weight), "max")
    assert same_bytes(whole.weight, parts.weight)
    assert same_bytes(whole.weight_scale, parts.weight_scale)


@settings(max_examples=20, deadline=None)
@given(make=st.sampled_from([weights, any_bits]), seed=st.integers(0, 10**6), rows=st.integers(1, 40))
def test_fp8_equals_modelopt(make, seed: int, rows: int) -> None:  # type: ignore[no-untyped-def]
    weight = make((rows, 48), seed)
    made, scale = pack_fp8(weight, amax(weight.unsqueeze(0))[0])
    assert scale == weight.abs().amax().float() / 448
    assert same_bytes(made, to_quantized_weight(weight, scale, QUANTIZATION_FP8))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("shape", [(8, 16), (1000, 2048)])
def test_amax_of_negative_and_of_nan(device: str, shape: tuple[int, int]) -> None:
    weight = weights((4, *shape), 2).to(device)
    weight[1] = -weight[1].abs()
    weight[2, 3, 3] = torch.nan
    weight[3] = 0
    found = amax(weight)
    assert torch.equal(found[:2], weight[:2].abs().amax(dim=(1, 2)).float())
    assert found[2].isnan()
    assert found[3] == 0


def fake_quantized(blocks: torch.Tensor, block_amax: torch.Tensor) -> torch.Tensor:
    """NVFP4 and back with the scale amax / 6 a block, as ModelOpt's calibrator asks for it, from its own rounding."""
    scale = (block_amax / 6).view(-1, 1)
    codes = NVFP4QTensor._cast_fp4(blocks.float() / scale)
    return NVFP4QTensor.get_e2m1_values("cpu")[codes.long()] * scale


@pytest.mark.parametrize("spread", [1e-3, 0.02, 4.0])
def test_mse_equals_modelopt(spread: float) -> None:
    weight = weights((1, 64, 256), 3, spread)
    weight[0, 0, :16] = 0
    weight[0, 1] *= 1e-3
    weight[0, 2, 5] = 5 * weight.abs().amax()
    blocks, largest = weight[0].view(-1, 16), amax(weight)
    calibrator = NVFP4MSECalibrator(blocks.abs().amax(1), largest[0], axis=0, quant_func=fake_quantized)
    calibrator.collect(blocks)
    block_amax = calibrator.compute_amax()
    assert torch.equal(sweep.best_block_amax(weight, largest).view(-1), block_amax.view(-1))
    quantizer = SimpleNamespace(block_sizes={-1: 16}, global_amax=largest[0], _amax=block_amax)
    scales, _ = NVFP4QTensor.get_weights_scaling_factor_from_quantizer(quantizer, weight[0])
    codes, _, _ = NVFP4QTensor.quantize(weight[0], 16, scales, largest[0] / 2688)
    made = pack_nvfp4(weight, largest, "mse")
    assert same_bytes(made.weight_scale[0], scales)
    assert same_bytes(made.weight[0], codes._quantized_data)


def test_the_sweep_leaves_out_no_better_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = any_bits((1, 64, 128), 4)
    pruned = sweep.best_block_amax(weight, amax(weight))
    monkeypatch.setattr(sweep, "_first_candidate", lambda *_: 0)
    assert torch.equal(sweep.best_block_amax(weight, amax(weight)), pruned)


def test_mse_is_closer_than_max() -> None:
    weight = weights((1, 256, 256), 5)
    error = {}
    for method in ("max", "mse"):
        made = pack_nvfp4(weight, amax(weight), method)
        scale = made.weight_scale.float().repeat_interleave(16, -1) * made.weight_scale_2
        low, high = made.weight & 15, made.weight >> 4
        codes = torch.stack([low, high], -1).view(weight.shape)
        error[method] = float((NVFP4QTensor.get_e2m1_values("cpu")[codes.long()] * scale - weight.float()).square().sum())
    assert error["mse"] < 0.95 * error["max"]


def test_gate_and_up_share_the_larger_scale() -> None:
    gate, up = weights((32, 64), 6), weights((32, 64), 7) * 3
    schemes = {"m.mlp.gate_proj": W4A16_NVFP4, "m.mlp.up_proj": W4A16_NVFP4}
    packer = Packer(SimpleNamespace(), schemes, "max", lambda _: True)
    named: dict[str, torch.Tensor] = {}
    for part in packer.pack("m.", {"mlp.gate_proj.weight": gate, "mlp.up_proj.weight": up}, {}):
        named |= part.tensors
    for name, weight in (("gate_proj", gate), ("up_proj", up)):
        codes, scales = modelopt_nvfp4(weight, up.abs().amax().float())
        assert same_bytes(named[f"m.mlp.{name}.weight"], codes)
        assert same_bytes(named[f"m.mlp.{name}.weight_scale"], scales)
    assert named["m.mlp.gate_proj.weight_scale_2"] == named["m.mlp.up_proj.weight_scale_2"]


@pytest.mark.parametrize("value", [0.0, torch.nan, torch.inf])
@pytest.mark.parametrize("method", ["max", "mse"])
@pytest.mark.parametrize("scheme", [FP8, W4A16_NVFP4])
def test_a_weight_without_a_scale_is_named(value: float, scheme: str, method: str) -> None:
    weight = torch.full((16, 32), value).bfloat16()
    packer = Packer(SimpleNamespace(), {"m.mlp.down_proj": scheme}, method, lambda _: True)
    [made] = packer.pack("m.", {"mlp.down_proj.weight": weight}, {"m.mlp.down_proj": torch.ones(())})
    with pytest.raises(InputError, match=r"tensor m\.mlp\.down_proj\.weight (is all zeros|holds NaN or infinity)"):
        made.check(made.magnitudes())


def test_of_fused_modules_the_one_without_a_scale_is_named() -> None:
    schemes = {"m.mlp.gate_proj": W4A16_NVFP4, "m.mlp.up_proj": W4A16_NVFP4}
    packer = Packer(SimpleNamespace(), schemes, "max", lambda _: True)
    tensors = {"mlp.gate_proj.weight": weights((16, 32), 1), "mlp.up_proj.weight": torch.zeros((16, 32)).bfloat16()}
    gate, up = packer.pack("m.", tensors, {})
    with pytest.raises(InputError, match=r"tensor m\.mlp\.up_proj\.weight is all zeros"):
        gate.check(gate.magnitudes())
    up.check(up.magnitudes())  # has nothing of its own to say: who has checked the first knows


@pytest.mark.parametrize("largest", [0.0, float("nan"), float("inf")])
def test_an_input_without_a_scale_is_named(largest: float) -> None:
    packer = Packer(SimpleNamespace(), {"m.self_attn.q_proj": FP8}, "max", lambda _: True)
    tensors, inputs = {"self_attn.q_proj.weight": weights((16, 32), 8)}, {"m.self_attn.q_proj": torch.tensor(largest)}
    [made] = packer.pack("m.", tensors, inputs)
    with pytest.raises(InputError, match=r"m\.self_attn\.q_proj: the largest magnitude of its input"):
        made.check(made.magnitudes())
