"""assemble.nvfp4 against ModelOpt's own quantizer, against torch's casts, and against a finished checkpoint."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from assemble import nvfp4
from assemble.checkpoint import Checkpoint
from assemble.dequantize import dequantize_nvfp4
from quantize.runner import Outcome


def bf16_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def floats(tensor: torch.Tensor) -> np.ndarray:
    return nvfp4.from_bf16(bf16_bytes(tensor), tensor.shape[1])


def modelopt_triple(weight: torch.Tensor, scale: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    block_scale, _ = NVFP4QTensor.get_weights_scaling_factor(weight, 16, scale)
    packed, _, _ = NVFP4QTensor.quantize(weight, 16, block_scale, scale)
    return packed._quantized_data.numpy(), block_scale.view(torch.uint8).numpy()


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    normal = torch.randn(64, 256, generator=generator)
    outlier = normal.clone()
    outlier[3, 5] = 1e4
    zeros = normal.clone()
    zeros[::2, 16:64] = 0
    spread = normal * torch.exp2(torch.randint(-60, 60, (64, 256), generator=generator).float())
    grid = torch.tensor([0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, -0.0])
    ties = torch.cat([grid, -grid]).repeat(64, 8) * torch.exp2(torch.arange(64).float() - 32)[:, None]
    cases = {"normal": normal, "outlier": outlier, "zero blocks": zeros, "spread": spread, "ties": ties}
    cases |= {"tiny": normal * 1e-30, "subnormal": normal * 1e-39, "huge": normal * 1e37, "one value": torch.zeros(4, 32)}
    cases["one value"][1, 20] = -3.0
    return {name: w.to(torch.bfloat16) for name, w in cases.items()}


@pytest.mark.parametrize("name", weights())
def test_equals_modelopt(name: str) -> None:
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    weight = weights()[name]
    scale = NVFP4QTensor.get_weights_scaling_factor_2(weight)
    packed, block_scale = modelopt_triple(weight, scale)
    mine = nvfp4.tensor_scale(nvfp4.amax([floats(weight)]))
    assert mine.tobytes() == scale.numpy().tobytes()
    result = nvfp4.quantize_rows(floats(weight), mine)
    assert np.array_equal(result.weight_scale, block_scale)
    assert np.array_equal(result.weight, packed)


def test_members_of_a_group_share_the_larger_scale() -> None:
    gate, up = weights()["normal"], weights()["outlier"]
    scale = nvfp4.tensor_scale(nvfp4.amax([floats(gate), floats(up)]))
    for weight in (gate, up):
        packed, block_scale = modelopt_triple(weight, torch.tensor(scale))
        result = nvfp4.quantize_rows(floats(weight), scale)
        assert np.array_equal(result.weight, packed)
        assert np.array_equal(result.weight_scale, block_scale)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 0xFFFF), min_size=64, max_size=64), st.integers(-20, 20))
def test_any_bits_equal_modelopt(bits: list[int], exponent: int) -> None:
    values = torch.from_numpy(np.array(bits, np.uint16).view(np.int16).copy()).view(torch.bfloat16).reshape(2, 32)
    values = torch.nan_to_num(values, nan=1.0, posinf=2.0, neginf=-2.0)
    scale = torch.tensor(2.0**exponent)
    packed, block_scale = modelopt_triple(values, scale)
    result = nvfp4.quantize_rows(floats(values), np.float32(2.0**exponent))
    assert np.array_equal(result.weight_scale, block_scale)
    assert np.array_equal(result.weight, packed)


def test_e4m3_equals_torch_on_every_bf16_and_on_halfway_points() -> None:
    every = (np.arange(0x10000, dtype=np.uint32) << 16).view(np.float32)
    steps = np.arange(0, 500, 1 / 128, dtype=np.float32)
    fine = np.concatenate([steps, -steps, steps / 512, np.nextafter(steps, np.float32(1e9))])
    for values in (every, fine):
        torchs = torch.from_numpy(values.copy()).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        mine = nvfp4.to_e4m3(values)
        number = ~np.isnan(values)
        assert np.array_equal(mine[number], torchs[number])
        assert np.all((mine[~number] & 0x7F) == 0x7F)


@pytest.mark.parametrize("name", ["normal", "outlier", "tiny", "huge"])
def test_fp8_equals_torchs_division_and_cast(name: str) -> None:
    weight = weights()[name]
    scale = weight.abs().amax().float() / 448.0
    expected = (weight / scale).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    mine = nvfp4.fp8_scale(nvfp4.amax([floats(weight)]))
    assert mine.tobytes() == scale.numpy().tobytes()
    assert np.array_equal(nvfp4.fp8_rows(floats(weight), mine), expected)


def test_finished_checkpoint_is_reproduced_from_the_source(quantized: Outcome, tiny: Path) -> None:
    made, source = Checkpoint.open(quantized.out), Checkpoint.open(tiny)
    for module, entry in made.config["quantization_config"]["quantized_layers"].items():
        weight = source[f"{module}.weight"]
        values = nvfp4.from_bf16(source.read(weight.name), weight.shape[1])
        if entry["quant_algo"] == "FP8":
            scale = nvfp4.fp8_scale(nvfp4.amax([values]))
            assert made.read(f"{module}.weight_scale") == scale.tobytes()
            assert made.read(f"{module}.weight") == nvfp4.fp8_rows(values, scale).tobytes()
            continue
        scale = np.frombuffer(made.read(f"{module}.weight_scale_2"), np.float32)[0]
        packed = nvfp4.quantize_rows(values, scale)
        assert made.read(f"{module}.weight") == packed.weight.tobytes()
        assert made.read(f"{module}.weight_scale") == packed.weight_scale.tobytes()
        if module.endswith("down_proj"):
            assert scale == nvfp4.tensor_scale(nvfp4.amax([values]))
        truth = values.ravel()
        back = dequantize_nvfp4(packed.weight, packed.weight_scale, float(scale)).ravel()
        assert back @ truth / (np.linalg.norm(back) * np.linalg.norm(truth)) > 0.99


def test_rows_are_cut_without_a_gap() -> None:
    chunks = list(nvfp4.row_chunks(1000, 5 * 1024 * 1024 // 8))
    assert chunks[0][0] == 0
    assert chunks[-1][1] == 1000
    assert all(a[1] == b[0] for a, b in itertools.pairwise(chunks))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0])
def test_weights_without_a_scale_are_refused(bad: float) -> None:
    values = np.zeros((2, 32), np.float32)
    values[1, 3] = bad
    with pytest.raises(nvfp4.NumericError, match="largest magnitude"):
        nvfp4.amax([values])
