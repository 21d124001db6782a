"""Where a quantized checkpoint's divergence comes from: KL with one part of it put back to BF16, or stored in FP8, at a time.

    python benchmarks/divergence_by_part.py CHECKPOINT SOURCE held-out.jsonl --rows 32 --tokens 512

Nothing is written: the part's matrices are replaced while the checkpoint is read back. `FP8` is weights only, a scale a
tensor, so it shows what the same part would cost in twice the bytes. `4/6` packs the NVFP4 matrices anew, in the same bytes:
each block's largest magnitude becomes 6 or 4, whichever leaves less squared error, with a tensor scale of amax / (6 * 256) so
that the larger block scales fit E4M3 (modelopt 0.47 torch/quantization/utils/numeric_utils.py, `E4M3_MAX_46`).
"""

import argparse
import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
import typer
from transformers import AutoTokenizer

from assemble.architecture import LM_HEAD, fused_group
from assemble.checkpoint import Checkpoint
from assemble.dequantize import E2M1
from assemble.formats import BLOCK, FP8
from quantize.console import Reporter
from quantize.evaluate.dequantize import to_e4m3
from quantize.evaluate.distance import summarize
from quantize.evaluate.evaluation import TOKENS_AT_ONCE, resolve_device
from quantize.evaluate.matrix import Matrix
from quantize.evaluate.rows import batches, read_rows
from quantize.evaluate.walk import walk
from quantize.evaluate.weights import Layer, Weights
from recipes import loader
from recipes.schema import Evaluation

PARTS = {
    "nothing": (),
    "lm_head": (LM_HEAD,),
    "down_proj": ("down_proj",),
    "gate_proj, up_proj": ("gate_proj", "up_proj"),
    "all NVFP4": (LM_HEAD, "down_proj", "gate_proj", "up_proj"),
    "attention and linear attention": ("q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkv", "in_proj_z", "out_proj"),
}

FORMS = {"nothing": ("",), "all NVFP4": ("4/6",), "attention and linear attention": ("BF16",)}


class Changed(Weights):
    """A checkpoint with some matrices replaced by the source's, or by these in FP8."""

    def __init__(self, checkpoint: Checkpoint, source: Weights, leaves: tuple[str, ...], form: str) -> None:
        super().__init__(checkpoint)
        self._source, self._leaves, self._form = source, leaves, form
        self.more_bytes = 0

    def stored_layer(self, index: int) -> Layer:
        """The layer with its matrices of the part replaced."""
        layer, source = super().stored_layer(index), self._source.stored_layer(index)
        matrices = {name: self._chosen(name, matrix, source.matrices) for name, matrix in layer.matrices.items()}
        return dataclasses.replace(layer, matrices=matrices)

    def stored_lm_head(self) -> Matrix:
        """The output matrix, replaced when it is the part."""
        return self._chosen(LM_HEAD, super().stored_lm_head(), {LM_HEAD: self._source.stored_lm_head()})

    def _chosen(self, name: str, matrix: Matrix, source: Mapping[str, Matrix]) -> Matrix:
        if matrix.scheme is None or name.rpartition(".")[2] not in self._leaves:
            return matrix
        origin = source[name]
        if self._form == "4/6":
            group = [source[member] for member in fused_group(name)] or [origin]
            return _four_over_six(origin, torch.stack([m.weight.abs().amax(dim=(-2, -1)).float() for m in group]).amax(0))
        made = origin if self._form == "BF16" else _fp8(origin)
        before = matrix.weight.nbytes + (matrix.scale.nbytes if matrix.packed else 0)
        self.more_bytes += made.weight.nbytes - before
        return made


def _fp8(matrix: Matrix) -> Matrix:
    scale = matrix.weight.abs().amax(dim=(-2, -1)).float() / 448
    divisor = scale[:, None, None] if matrix.stacked else scale
    return Matrix(FP8, to_e4m3(matrix.weight, divisor), scale)


def _four_over_six(matrix: Matrix, amax: torch.Tensor) -> Matrix:
    """The values [.., N, K] that an NVFP4 packing with 4 or 6 for each block's largest reads back as, in BF16."""
    tensor_scale = (amax / (6 * 256))[..., None, None, None]
    blocks = matrix.weight.float().unflatten(-1, (-1, BLOCK))
    largest = blocks.abs().amax(-1, keepdim=True)
    tries = [_packed(blocks, largest / (top * tensor_scale), tensor_scale) for top in (6, 4)]
    errors = [(made - blocks).square().sum(-1, keepdim=True) for made in tries]
    return Matrix(None, torch.where(errors[1] < errors[0], tries[1], tries[0]).flatten(-2).bfloat16())


def _packed(blocks: torch.Tensor, block_scale: torch.Tensor, tensor_scale: torch.Tensor) -> torch.Tensor:
    scale = block_scale.clamp(2.0**-9, 448).to(torch.float8_e4m3fn).float() * tensor_scale
    codes = torch.bucketize((blocks / scale).abs(), torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]))
    return torch.from_numpy(E2M1[:8])[codes] * blocks.sign() * scale


def main() -> None:
    """Prints a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("source", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--device", default="auto")
    asked = parser.parse_args()
    settings, base = Evaluation(rows=asked.rows, tokens=asked.tokens), loader.load(loader.DEFAULT).recipe.calibration
    known = asked.checkpoint.with_name(asked.checkpoint.name + ".run") / "calibrate" / "rows.npy"
    calibrated = [np.load(known)] if known.is_file() else None
    rows = read_rows(asked.data, AutoTokenizer.from_pretrained(asked.source), settings, base, calibrated)
    device = resolve_device(asked.device)
    made, source = batches(rows.rows, TOKENS_AT_ONCE[device]), Weights(Checkpoint.open(asked.source))
    typer.echo(f"{len(rows.rows)} rows, {rows.scored_tokens:,} tokens scored\n")
    typer.echo("| put back | as | more bytes | mean KL | p99 KL | NLL |\n|---|---|---|---|---|---|")
    for part, leaves in PARTS.items():
        for form in FORMS.get(part, ("BF16", "FP8")):
            written = Changed(Checkpoint.open(asked.checkpoint), source, leaves, form)
            found = summarize(walk(source, written, source, made, device, Reporter()).scores)
            kl, p99, nll = (found[name].value for name in ("kl_mean", "kl_p99", "nll_increase"))
            more = f"{written.more_bytes / sum(t.nbytes for t in written.checkpoint.values()):+.1%}"
            numbers = f"{kl:.5f} | {p99:.4f} | {nll:+.4f}"
            typer.echo(f"| {part} | {form} | {more if leaves else ''} | {numbers} |")


if __name__ == "__main__":
    main()
