"""One checkpoint against its source: reads both back, measures everything, writes the report."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from assemble.architecture import MTP_PREFIX, Architecture
from assemble.checkpoint import Checkpoint
from assemble.errors import InputError
from assemble.jsonfile import write_object
from quantize.console import Reporter
from quantize.evaluate import gates, plots
from quantize.evaluate.distance import summarize
from quantize.evaluate.markdown import markdown
from quantize.evaluate.outliers import outliers
from quantize.evaluate.report import Report, histogram, simulated_by, tokens_per_step
from quantize.evaluate.rows import HeldOut, batches, read_rows
from quantize.evaluate.walk import walk
from quantize.evaluate.weights import Weights
from quantize.machine import available_memory_bytes, peak_memory_bytes, reset_peak_memory
from recipes.schema import Calibration, Evaluation

TOKENS_AT_ONCE = {"cpu": 2048, "cuda": 8192}  # tokens a forward pass
PROMPTS, PROMPT_TOKENS = 16, 256  # of prompts.jsonl, which a smoke test serves, and of drafting
JSON, MARKDOWN, MODULES, PROMPTS_FILE = "report.json", "report.md", "modules.jsonl", "prompts.jsonl"
LAYER_PLOT, KL_PLOT, ACCEPTANCE_PLOT = "layer-error.png", "kl-histogram.png", "acceptance.png"
SAME_FIELDS = ("hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim")


@dataclass(frozen=True)
class Drafting:
    """What to measure of the MTP head.

    Attributes:
        wanted: None: when the head is there and the models fit in memory. True: read the weights again and again if need be.
        casts: Formats to round the head to besides, `FP8` or `NVFP4`.
        draft_cost: A draft beside a pass of the body; None: from the bytes read.
        verify_cost: A further token in a pass of the body; None: from the bytes read.
    """

    wanted: bool | None = None
    casts: Sequence[str] = ()
    draft_cost: float | None = None
    verify_cost: float | None = None


@dataclass(frozen=True)
class Subject:
    """What is evaluated.

    Attributes:
        checkpoint: The written checkpoint.
        source: What it was made of.
        head: What its MTP head was taken from.
        name: Of the checkpoint, in reports.
        source_name: Of the source.
    """

    checkpoint: Weights
    source: Weights
    head: Weights
    name: str
    source_name: str


def open_subject(root: Path, source: Path, head: Path | None, name: str, source_name: str) -> Subject:
    """Opens the checkpoints.

    Raises:
        InputError: unsound files, another family, or a checkpoint that was not made of this source.
    """
    written, origin = Weights(Checkpoint.open(root)), Weights(Checkpoint.open(source))
    _check_same(root, written.architecture, source, origin.architecture)
    if "quantization_config" in origin.checkpoint.config:
        raise InputError(f"--source {source} is quantized itself. Give the BF16 checkpoint that {root} was made of.")
    other = Weights(Checkpoint.open(head)) if head is not None and head != source else origin
    return Subject(written, origin, other, name, source_name)


def _check_same(root: Path, written: Architecture, source: Path, origin: Architecture) -> None:
    pairs: list[tuple[str, Any, Any]] = [
        ("model_type", written.model_type, origin.model_type),
        ("layer_types", written.layer_types, origin.layer_types),
    ]
    pairs += [(field, written.text.get(field), origin.text.get(field)) for field in SAME_FIELDS]
    for field, mine, theirs in pairs:
        if mine != theirs:
            raise InputError(
                f"{root} was not made of {source}: {field} is {mine} here and {theirs} there. Give its own --source."
            )


def held_out(
    subject: Subject, data: Path | None, settings: Evaluation, base: Calibration, calibrated: Sequence[Path]
) -> HeldOut:
    """The rows.

    Args:
        subject: Whose source's tokenizer is used.
        data: A local set; None: the recipe's dataset.
        settings: How many rows, how long, and which dataset.
        base: The recipe's calibration data.
        calibrated: Where the calibration rows of the run of each checkpoint would be.

    Raises:
        InputError: no text, or a tokenizer that is not there or another model's.
    """
    from transformers import AutoTokenizer

    root = subject.source.checkpoint.root
    if not any((root / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise InputError(
            f"{root} has no tokenizer, and the held-out text has to become tokens. Put the model's own files there."
        )
    tokenizer = AutoTokenizer.from_pretrained(root, local_files_only=True)
    there = all(path.is_file() for path in calibrated)
    known = [np.load(path, allow_pickle=False) for path in calibrated] if calibrated and there else None
    found = read_rows(data, tokenizer, settings, base, known)
    largest, vocabulary = max(int(row.max()) for row in found.rows), int(subject.source.architecture.text["vocab_size"])
    if largest >= vocabulary:
        raise InputError(
            f"the tokenizer in {root} gives token {largest}, and the model has {vocabulary}: it is another model's."
        )
    return found


def evaluate(
    subject: Subject, rows: HeldOut, settings: Evaluation, drafting: Drafting, device: str, reporter: Reporter
) -> Report:
    """Measures everything.

    Args:
        subject: What.
        rows: Held-out text.
        settings: The gates, among other things.
        drafting: What to measure of the MTP head.
        device: `cpu` or `cuda`.
        reporter: Where progress goes.
    """
    reset_peak_memory()
    started = time.monotonic()
    made = batches(rows.rows, TOKENS_AT_ONCE[device])
    walked = walk(subject.source, subject.checkpoint, subject.head, made, device, reporter)
    quality = summarize(walked.scores)
    if np.isfinite(walked.scores.nll_quantized).all():
        mtp, left_out = _drafting(subject, rows, drafting, device, reporter)
    else:
        mtp, left_out = None, "the checkpoint's predictions are not numbers"
    found = outliers(walked)
    values = {name: estimate.value for name, estimate in quality.items()}
    judged = gates.judge(settings, values, tokens_per_step(mtp, settings.num_speculative_tokens), len(found))
    done, left = simulated_by(subject.checkpoint)
    return Report(
        name=subject.name,
        source=subject.source_name,
        held_out=rows,
        walked=walked,
        quality=quality,
        outliers=found,
        mtp=mtp,
        mtp_left_out=left_out,
        gates=judged,
        size_bytes=subject.checkpoint.size_bytes,
        source_bytes=subject.source.size_bytes,
        simulated=done,
        not_simulated=left,
        device=_device_name(device),
        seconds=time.monotonic() - started,
        peak_memory_bytes=peak_memory_bytes(),
    )


def resolve_device(requested: str) -> str:
    """`cuda` when there is a GPU and the CPU was not asked for, else `cpu`.

    Raises:
        InputError: a GPU asked for that PyTorch does not see.
    """
    import torch

    if requested == "cuda" and not torch.cuda.is_available():
        raise InputError(
            "--device cuda: PyTorch sees no GPU here. Check nvidia-smi and the PyTorch build, or use --device cpu."
        )
    return "cuda" if requested != "cpu" and torch.cuda.is_available() else "cpu"


def write_report(report: Report, out: Path) -> list[str]:
    """Writes the report's files and returns their names, report.json last.

    Args:
        report: What was measured.
        out: A folder; made where it is not there.
    """
    out.mkdir(parents=True, exist_ok=True)
    (out / ACCEPTANCE_PLOT).unlink(missing_ok=True)
    quality = report.quality
    plots.layer_error(report.walked.layers, out / LAYER_PLOT)
    plots.kl_histogram(histogram(report.walked.scores), quality["kl_mean"].value, quality["kl_p99"].value, out / KL_PLOT)
    drawn = [LAYER_PLOT, KL_PLOT]
    if report.mtp is not None and report.mtp["bodies"]:
        plots.acceptance(report.mtp, out / ACCEPTANCE_PLOT)
        drawn.append(ACCEPTANCE_PLOT)
    _write_lines(out / MODULES, [module.as_json() for module in report.walked.modules])
    _write_lines(out / PROMPTS_FILE, report.prompts(PROMPTS, PROMPT_TOKENS))
    (out / MARKDOWN).write_text(markdown(report.facts(), drawn, _mtp_section(report)), encoding="utf-8")
    write_object(out / JSON, report.as_json())
    return [*drawn, MODULES, PROMPTS_FILE, MARKDOWN, JSON]


def _write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _mtp_section(report: Report) -> list[str]:
    from quantize.evaluate import mtp

    return mtp.markdown(report.mtp) if report.mtp is not None else []


def _drafting(
    subject: Subject, rows: HeldOut, drafting: Drafting, device: str, reporter: Reporter
) -> tuple[dict[str, Any] | None, str | None]:
    """What was measured of the head, or why nothing was."""
    from quantize.evaluate import mtp

    if drafting.wanted is False:
        return None, "it was not asked for"
    if not any(name.startswith(MTP_PREFIX) for name in subject.checkpoint.checkpoint):
        return None, "the checkpoint has none"
    if drafting.wanted is None and (short := _too_large(subject.source, device)):
        return None, short
    tokens = min(PROMPT_TOKENS, max(len(row) for row in rows.rows))
    settings = mtp.Settings(
        num_prompts=PROMPTS,
        prompt_tokens=tokens,
        casts=tuple(drafting.casts),
        draft_cost=drafting.draft_cost,
        verify_cost=drafting.verify_cost,
    )
    ids = [row.tolist() for row in rows.rows]
    origin = subject.head if subject.head is not subject.source else None
    return mtp.evaluate_mtp(subject.source, subject.checkpoint, ids, settings, device, reporter, origin=origin), None


def _too_large(source: Weights, device: str) -> str | None:
    """Why the head is not measured unless it is asked for: the text that it drafts for takes many passes of the body."""
    import torch

    free = torch.cuda.mem_get_info()[0] if device == "cuda" else available_memory_bytes()
    if source.size_bytes < free * 0.8:
        return None
    return (
        f"the BF16 model takes {source.size_bytes / 1e9:.1f} GB and {free / 1e9:.1f} GB are free; `evaluate --mtp` measures it "
        "all the same, and reads the weights about 50 times"
    )


def _device_name(device: str) -> str:
    import torch

    return torch.cuda.get_device_name() if device == "cuda" else "cpu"
