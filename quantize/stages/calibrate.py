"""calibrate: the rows of tokens that the FP8 input scales will be measured on. Before any model is loaded."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from assemble.architecture import read_architecture
from assemble.writer import sha256_file
from quantize import calibration
from quantize.console import output_to
from quantize.stage import Context, Result
from quantize.stages import fetch

FILE = "rows.npy"


def run(context: Context) -> Result:
    """Writes rows.npy: token ids [num_samples, sequence_length], int32."""
    settings = context.recipe.calibration
    path = context.request.calibration
    root = Path(context.records["fetch"].facts["model"]["root"])
    with output_to(context.directory / "log.txt"):
        from transformers import AutoTokenizer

        documents, commit = _documents(context)
        tokenizer = AutoTokenizer.from_pretrained(root, local_files_only=True)
        with context.reporter.task("tokenize", settings.num_samples * settings.sequence_length) as progress:
            rows = calibration.pack_rows(documents, tokenizer, settings, progress=progress)
    source, _ = fetch.opened(context.records["fetch"])
    calibration.check_vocabulary(rows, int(read_architecture(source.config, source).text["vocab_size"]))
    fetch.check_calibration_unchanged(context.records["fetch"])
    np.save(context.directory / FILE, rows)
    facts = {
        "data": path.name if path else settings.dataset,
        "commit": commit,
        "rows": len(rows),
        "tokens_per_row": rows.shape[1],
        "token_ids_sha256": calibration.rows_sha256(rows),
    }
    return Result({FILE: sha256_file(context.directory / FILE)}, facts)


def _documents(context: Context) -> tuple[Sequence[Any], str | None]:
    path, settings = context.request.calibration, context.recipe.calibration
    if path:
        return calibration.documents_from_path(path, settings), None
    return calibration.documents_from_hub(settings)
