"""Held-out text: documents, each cut to its first tokens. None of it may be text that the checkpoint was calibrated on."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from assemble.errors import InputError
from quantize import calibration
from recipes.schema import Calibration, Evaluation

WINDOW = 32  # tokens; text of this length that is also in the calibration rows counts as the same text
CALIBRATED = 0.9  # share of a row's windows beyond which the row itself was calibrated on: it is left out
SIMILAR = 0.5  # share beyond which it only has much in common with what was, such as a long licence: it is counted
SHORTEST = 16  # tokens; a shorter document is left out

Ids = npt.NDArray[np.int32]


class HeldOutError(InputError):
    """Held-out text that is not there, not readable, or not enough."""


@dataclass(frozen=True)
class Batch:
    """Rows of equal length, so that none is padded: their numbers, and token ids [B, T], int64."""

    rows: list[int]
    ids: Any


@dataclass(frozen=True)
class HeldOut:
    """The rows of an evaluation.

    Attributes:
        rows: Token ids of each row.
        name: Of the data, without a path.
        commit: Of a Hub dataset, where known.
        calibration: `disjoint`: compared with the rows that were calibrated on; `unknown`: these are not here.
        excluded: Rows that were left out because they were calibrated on.
        similar: Rows that share more than half of their text with the calibration rows.
    """

    rows: tuple[Ids, ...]
    name: str
    commit: str | None
    calibration: str
    excluded: int
    similar: int = 0

    @property
    def scored_tokens(self) -> int:
        """Tokens that have a prediction: all but the first of each row."""
        return sum(len(row) - 1 for row in self.rows)

    def as_json(self) -> dict[str, Any]:
        """Plain data for reports and records."""
        flat = np.concatenate([np.append(row, -1) for row in self.rows]).astype(np.int32)
        return {
            "name": self.name,
            "commit": self.commit,
            "rows": len(self.rows),
            "tokens_per_row": max(len(row) for row in self.rows),
            "scored_tokens": self.scored_tokens,
            "token_ids_sha256": calibration.rows_sha256(flat),
            "calibration": "excluded" if self.excluded else self.calibration,
            "excluded_rows": self.excluded,
            "similar_rows": self.similar,
        }


def read_rows(
    path: Path | None, tokenizer: Any, settings: Evaluation, base: Calibration, calibrated: Sequence[Ids] | None
) -> HeldOut:
    """The held-out rows, in the order of the data.

    Args:
        path: A local set; None: the dataset that the recipe names.
        tokenizer: The source's.
        settings: How many rows, how long, and which dataset.
        base: The recipe's calibration data: what `settings` leaves open is as there.
        calibrated: The rows that were calibrated on, [rows, tokens] of each run; None when they are not all known.

    Raises:
        InputError: no data, unreadable data, or nothing in it that was not calibrated on.
    """
    data = base.model_copy(
        update={
            name: value for name in ("dataset", "config", "split", "column") if (value := getattr(settings, name)) is not None
        }
    )
    documents, commit = _documents(path, data)
    name = path.name if path else ", ".join(part for part in (data.dataset, data.config, data.split) if part)
    known = set().union(*map(_windows, calibrated)) if calibrated is not None else None
    rows, excluded, similar = list[Ids](), 0, 0
    for number, document in enumerate(documents, 1):
        row = np.array(calibration.document_ids(document, tokenizer, number)[: settings.tokens], np.int32)
        if len(row) < SHORTEST:
            continue
        share = _share(row, known) if known else 0.0
        if share > CALIBRATED:
            excluded += 1
            continue
        similar += share > SIMILAR
        rows.append(row)
        if len(rows) == settings.rows:
            break
    if not rows:
        raise HeldOutError(
            f"{name} has no held-out text of {SHORTEST} tokens or more"
            + (f": {excluded} rows of it were calibrated on. Give text that was not: --data PATH." if excluded else ".")
        )
    return HeldOut(tuple(rows), name, commit, "unknown" if known is None else "disjoint", excluded, similar)


def batches(rows: Sequence[Ids], tokens: int) -> list[Batch]:
    """Rows of equal length together, `tokens` tokens a batch or one row."""
    import torch

    groups: dict[int, list[int]] = {}
    for number, row in enumerate(rows):
        groups.setdefault(len(row), []).append(number)
    made = []
    for length, numbers in sorted(groups.items(), reverse=True):
        step = max(1, tokens // length)
        for first in range(0, len(numbers), step):
            part = numbers[first : first + step]
            made.append(Batch(part, torch.from_numpy(np.stack([rows[n] for n in part])).long()))
    return made


def _documents(path: Path | None, data: Calibration) -> tuple[Sequence[Any], str | None]:
    if path is not None:
        return _local(path, data), None
    try:
        return calibration.documents_from_hub(data)
    except calibration.CalibrationError as error:
        why = str(error).partition("cannot be used: ")[2].partition(". Ways out")[0] or str(error)
        raise HeldOutError(
            f"no held-out text: the recipe's dataset {data.dataset}, split {data.split}, cannot be used ({why}). "
            "Give your own: --data PATH, a .jsonl or .parquet file with a column article, text or messages, or a folder saved "
            "by `datasets`."
        ) from error


def _local(path: Path, data: Calibration) -> Sequence[Any]:
    """The documents of a local set, read as calibration data is; its errors speak of what this is."""
    if not path.exists():
        raise HeldOutError(f"held-out text {path} does not exist. Check the path that --data gives.")
    try:
        return calibration.documents_from_path(path, data)
    except calibration.CalibrationError as error:
        raise HeldOutError(str(error).replace("calibration data", "held-out text")) from error


def _windows(rows: Ids) -> set[bytes]:
    """Every stretch of `WINDOW` tokens of the calibration rows, which follow on each other."""
    flat = np.ascontiguousarray(rows.reshape(-1), np.int32)
    if len(flat) < WINDOW:
        return set()
    return {window.tobytes() for window in np.lib.stride_tricks.sliding_window_view(flat, WINDOW)}


def _share(row: Ids, known: set[bytes]) -> float:
    if len(row) < WINDOW:
        return 0.0
    windows = np.lib.stride_tricks.sliding_window_view(row, WINDOW)
    return sum(window.tobytes() in known for window in windows) / len(windows)
