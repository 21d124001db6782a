"""Reads the number formats of `assemble.formats` back to float32."""

import numpy as np
import numpy.typing as npt

from assemble.formats import BLOCK

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)


def _e4m3_values() -> npt.NDArray[np.float32]:
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, (codes & 7).astype(np.float64)
    magnitude = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    magnitude[(codes & 127) == 127] = np.nan
    return np.where(codes < 128, magnitude, -magnitude).astype(np.float32)


E4M3 = _e4m3_values()


def unpack_e2m1(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """E2M1 values [N, K] of packed bytes [N, K/2]; the even element is the low nibble."""
    values = np.empty((*packed.shape[:-1], packed.shape[-1] * 2), dtype=np.float32)
    values[..., 0::2] = E2M1[packed & 15]
    values[..., 1::2] = E2M1[packed >> 4]
    return values


def dequantize_nvfp4(
    packed: npt.NDArray[np.uint8], block_scale: npt.NDArray[np.uint8], tensor_scale: float
) -> npt.NDArray[np.float32]:
    """The float32 weight [N, K] of an NVFP4 triple.

    Args:
        packed: `weight`, uint8 [N, K/2].
        block_scale: `weight_scale`, E4M3 codes as uint8 [N, K/16].
        tensor_scale: `weight_scale_2`.
    """
    scale = E4M3[block_scale] * np.float32(tensor_scale)
    return unpack_e2m1(packed) * np.repeat(scale, BLOCK, axis=-1)


def dequantize_fp8(codes: npt.NDArray[np.uint8], scale: float) -> npt.NDArray[np.float32]:
    """The float32 weight of E4M3 codes (uint8, any shape) and their one scale."""
    return E4M3[codes] * np.float32(scale)
