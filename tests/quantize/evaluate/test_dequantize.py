"""Reading back, code by code: against the reference of `assemble.dequantize`, compressed-tensors and ModelOpt."""

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from hypothesis import given, settings
from hypothesis import strategies as st

from assemble import dequantize
from quantize.evaluate.dequantize import (
    dequantize_fp8,
    dequantize_nvfp4,
    round_fp8,
    to_e4m3,
)
from quantize.evaluate.matrix import Matrix, read_matrix, stack


def random_triple(seed: int, rows: int, blocks: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    packed = torch.from_numpy(rng.integers(0, 256, (rows, blocks * 8), dtype=np.uint8))
    codes = torch.from_numpy(rng.integers(0, 0x7F, (rows, blocks), dtype=np.uint8)).view(torch.float8_e4m3fn)
    return packed, codes, torch.tensor(float(rng.uniform(1e-6, 10)))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), rows=st.integers(1, 5), blocks=st.integers(1, 4))
def test_nvfp4_is_the_reference_and_compressed_tensors(seed: int, rows: int, blocks: int) -> None:
    packed, codes, scale = random_triple(seed, rows, blocks)
    mine = dequantize_nvfp4(packed, codes, scale).numpy()
    reference = dequantize.dequantize_nvfp4(packed.numpy(), codes.view(torch.uint8).numpy(), float(scale))
    np.testing.assert_array_equal(mine, reference)
    np.testing.assert_array_equal(np.signbit(mine), np.signbit(reference))  # -0 too
    values = unpack_fp4_from_uint8(packed, rows, blocks * 16, dtype=torch.float32).reshape(rows, blocks, 16)
    np.testing.assert_array_equal(mine, (values * (codes.float() * scale)[..., None]).reshape(rows, -1).numpy())


def test_nvfp4_is_modelopts() -> None:
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    quantized, block_scale, tensor_scale = NVFP4QTensor.quantize(weight, 16)
    theirs = quantized.dequantize(dtype=torch.float32, scale=block_scale, double_scale=tensor_scale, block_sizes={-1: 16})
    torch.testing.assert_close(dequantize_nvfp4(quantized._quantized_data, block_scale, tensor_scale), theirs, rtol=0, atol=0)


def test_fp8_is_the_reference_and_modelopts() -> None:
    from modelopt.torch.quantization.qtensor import FP8QTensor

    weight = torch.randn(8, 32, generator=torch.Generator().manual_seed(2)).bfloat16()
    scale = weight.abs().amax().float() / 448
    quantized, _ = FP8QTensor.quantize(weight, scale)
    codes = quantized._quantized_data
    mine = dequantize_fp8(codes, scale)
    np.testing.assert_array_equal(mine.numpy(), dequantize.dequantize_fp8(codes.view(torch.uint8).numpy(), float(scale)))
    theirs = quantized.dequantize(dtype=torch.float32, scale=scale)
    torch.testing.assert_close(mine, theirs, rtol=2e-7, atol=0)


def test_a_stack_of_experts_is_read_as_each_by_itself() -> None:
    triples = [random_triple(seed, 6, 3) for seed in range(4)]
    names = ("weight", "weight_scale", "weight_scale_2")
    each = [read_matrix(f"e.{i}", dict(zip(names, t, strict=True)), "W4A16_NVFP4") for i, t in enumerate(triples)]
    values = stack(each).values()
    for expert, matrix in zip(values, each, strict=True):
        torch.testing.assert_close(expert, matrix.values(), rtol=0, atol=0)


def test_parts_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = Matrix("W4A16_NVFP4", *random_triple(3, 10, 2))
    whole = matrix.values()
    monkeypatch.setattr("quantize.evaluate.matrix.PART_ELEMENTS", 3 * 32)
    parts = list(matrix.parts())
    assert [first for first, _ in parts] == [0, 3, 6, 9]
    torch.testing.assert_close(torch.cat([part.values() for _, part in parts]), whole, rtol=0, atol=0)
    torch.testing.assert_close(matrix.bf16(), whole.bfloat16(), rtol=0, atol=0)


def test_e4m3_clamps_and_rounds_like_a_static_scale() -> None:
    values = torch.tensor([0.0, -0.0, 1e-9, 0.3, -0.3, 500.0, 1e6, -1e6])
    assert to_e4m3(values, 1.0).float().tolist()[-3:] == [448.0, 448.0, -448.0]
    torch.testing.assert_close(round_fp8(values, 2.0)[3], torch.tensor(0.3125))  # 0.15 lies between 0.140625 and 0.15625
    assert round_fp8(values, 0.01).max() == pytest.approx(4.48)
    assert round_fp8(values.bfloat16(), 1.0).dtype == torch.bfloat16
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = every[~every.isnan()]
    torch.testing.assert_close(round_fp8(numbers * 0.5, 0.5), numbers * 0.5, rtol=0, atol=0)
