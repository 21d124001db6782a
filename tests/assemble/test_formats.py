"""The number formats, code by code, against torch and compressed-tensors."""

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from hypothesis import given
from hypothesis import strategies as st

from assemble.dequantize import E2M1, E4M3, dequantize_fp8, dequantize_nvfp4, unpack_e2m1
from assemble.formats import BLOCK, FP8, NVFP4, W4A16_NVFP4, ShapeError, layer_entry, quantized_tensors


def test_every_e4m3_code_is_torchs() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    theirs = codes.view(torch.float8_e4m3fn).to(torch.float32).numpy()
    np.testing.assert_array_equal(E4M3, theirs)
    assert np.signbit(E4M3[0x80])
    assert np.isnan(E4M3[[0x7F, 0xFF]]).all()
    assert np.nanmax(E4M3) == 448


def test_every_e2m1_code() -> None:
    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert E2M1.tolist() == [*magnitudes, *(-m for m in magnitudes)]
    assert np.signbit(E2M1[8])


def test_every_byte_unpacks_as_compressed_tensors_does() -> None:
    packed = np.arange(256, dtype=np.uint8).reshape(16, 16)
    theirs = unpack_fp4_from_uint8(torch.from_numpy(packed), 16, 32, dtype=torch.float32).numpy()
    mine = unpack_e2m1(packed)
    np.testing.assert_array_equal(mine, theirs)
    np.testing.assert_array_equal(np.signbit(mine), np.signbit(theirs))
    assert mine[0, 2] == 0.5  # byte 1: the even element is the low nibble


@given(rows=st.integers(1, 5), blocks=st.integers(1, 4), seed=st.integers(0, 99), scale=st.floats(2.0**-26, 10, width=32))
def test_dequantize_nvfp4_is_compressed_tensors(rows: int, blocks: int, seed: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    packed = rng.integers(0, 256, (rows, blocks * BLOCK // 2), dtype=np.uint8)
    codes = rng.integers(0, 0x7F, (rows, blocks), dtype=np.uint8)
    values = unpack_fp4_from_uint8(torch.from_numpy(packed), rows, blocks * BLOCK, dtype=torch.float32)
    block_scale = torch.from_numpy(codes).view(torch.float8_e4m3fn).to(torch.float32) * scale
    theirs = (values.reshape(rows, blocks, BLOCK) * block_scale[..., None]).reshape(rows, -1).numpy()
    mine = dequantize_nvfp4(packed, codes, scale)
    assert mine.dtype == np.float32
    np.testing.assert_array_equal(mine, theirs)


@given(seed=st.integers(0, 99), scale=st.floats(2.0**-26, 10, width=32))
def test_dequantize_fp8_is_torchs(seed: int, scale: float) -> None:
    codes = np.random.default_rng(seed).integers(0, 256, (3, 7), dtype=np.uint8)
    theirs = torch.from_numpy(codes).view(torch.float8_e4m3fn).to(torch.float32) * torch.tensor(scale)
    np.testing.assert_array_equal(dequantize_fp8(codes, scale), theirs.numpy())


@given(rows=st.integers(1, 9999), blocks=st.integers(1, 999))
def test_sizes(rows: int, blocks: int) -> None:
    shape = (rows, blocks * BLOCK)
    weight, scale, scale_2 = quantized_tensors("m", W4A16_NVFP4, shape)
    assert weight.nbytes * 2 == scale.nbytes * BLOCK == rows * blocks * BLOCK
    assert (weight.dtype, scale.dtype, scale_2.dtype, scale_2.shape) == ("U8", "F8_E4M3", "F32", ())
    assert [t.name for t in quantized_tensors("m", NVFP4, shape)] == [
        "m.weight", "m.weight_scale", "m.weight_scale_2", "m.input_scale",
    ]  # fmt: skip
    assert [t.nbytes for t in quantized_tensors("m", FP8, shape)] == [rows * blocks * BLOCK, 4, 4]


@pytest.mark.parametrize(
    ("scheme", "shape"), [(W4A16_NVFP4, (8, 24)), (NVFP4, (8, 15)), (FP8, (8,)), (W4A16_NVFP4, (2, 8, 16))]
)
def test_shapes_that_cannot_be(scheme: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match=r"m\.weight"):
        quantized_tensors("m", scheme, shape)


def test_layer_entries() -> None:
    assert layer_entry(FP8) == {"quant_algo": "FP8"}
    assert layer_entry(W4A16_NVFP4) == {"quant_algo": "W4A16_NVFP4", "group_size": 16}
