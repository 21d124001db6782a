"""Finds quantized weights that are not the source's: written wrong, of another tensor, with NaN among their scales."""

import numpy as np

from assemble.dequantize import dequantize_fp8, dequantize_nvfp4
from assemble.formats import BLOCK, FP8, W4A16_NVFP4
from assemble.mend.draft import Draft
from assemble.mend.origins import Stored
from assemble.nvfp4 import Float32, from_bf16
from assemble.rules.identity import LEAST_COSINE
from assemble.writer import read_chunks

SAMPLED_ROWS = 16


def weights_of_the_source(draft: Draft) -> None:
    """Rows of every packed weight, spread over it, are close to the source's, and no block scale is NaN or negative.

    What is not becomes suspect: `modules.whole_modules` then quantizes it anew.
    """
    if draft.source is None:
        return
    for module, shape in draft.modules.items():
        scheme, truth = draft.scheme(module), draft.source_weight(module)
        if scheme is None or truth is None or truth.tensor.shape != shape:
            continue
        parts = [draft.tensors.get(f"{module}.{leaf}") for leaf in ("weight", "weight_scale")]
        if not all(isinstance(p, Stored) for p in parts):
            continue
        if _nan_scales(draft, module, scheme) or not _close(draft, module, scheme, truth):
            draft.suspect.add(module)


def _nan_scales(draft: Draft, module: str, scheme: str) -> bool:
    origin = draft.tensors[f"{module}.weight_scale"]
    if scheme != W4A16_NVFP4 or not isinstance(origin, Stored) or origin.tensor.dtype != "F8_E4M3":
        return False
    return any(bool((np.frombuffer(chunk, np.uint8) >= 0x7F).any()) for chunk in read_chunks(origin.path, origin.tensor))


def _close(draft: Draft, module: str, scheme: str, truth: Stored) -> bool:
    """Whether the sampled rows have the source's direction and size; True where headers alone show that they cannot."""
    rows, columns = truth.tensor.shape
    chosen = sorted({round(i * (rows - 1) / (SAMPLED_ROWS - 1)) for i in range(SAMPLED_ROWS)})
    mine = [_row(draft, module, scheme, row, columns) for row in chosen]
    if any(row is None for row in mine):
        return True  # a part is absent or misshapen: `whole_modules` sees that
    a = np.concatenate([row.ravel() for row in mine if row is not None]).astype(np.float64)
    b = np.concatenate([from_bf16(truth.rows(row, row + 1).read(), columns).ravel() for row in chosen]).astype(np.float64)
    sizes = float(np.linalg.norm(a)), float(np.linalg.norm(b))
    if not sizes[0] or not sizes[1]:
        return sizes[0] == sizes[1]
    return float(a @ b) / (sizes[0] * sizes[1]) > LEAST_COSINE and 0.9 < sizes[0] / sizes[1] < 1.1


def _row(draft: Draft, module: str, scheme: str, row: int, columns: int) -> Float32 | None:
    """One row of a packed weight, dequantized; None when its tensors do not have the format's dtypes and shapes."""
    weight, scale = draft.tensors[f"{module}.weight"], draft.tensors[f"{module}.weight_scale"]
    tensor_scale = draft.scalar(f"{module}.weight_scale" if scheme == FP8 else f"{module}.weight_scale_2")
    if not isinstance(weight, Stored) or not isinstance(scale, Stored) or tensor_scale is None or weight.tensor.shape[0] <= row:
        return None
    codes = np.frombuffer(weight.rows(row, row + 1).read(), np.uint8)
    if scheme == FP8:
        return dequantize_fp8(codes, float(tensor_scale)) if codes.size == columns else None
    good = scale.tensor.dtype == "F8_E4M3" and scale.tensor.shape == (weight.tensor.shape[0], columns // BLOCK)
    if codes.size != columns // 2 or not good:
        return None
    blocks = np.frombuffer(scale.rows(row, row + 1).read(), np.uint8)
    return dequantize_nvfp4(codes[None], blocks[None], float(tensor_scale))
