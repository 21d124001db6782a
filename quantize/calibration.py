"""Calibration rows: text into full blocks of tokens.

Documents are put in a seeded order, tokenized, joined with the end-of-text token, and cut into rows of equal length.
No row is padded, so no padding token is ever measured.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from assemble.errors import InputError
from recipes.schema import Calibration

COLUMNS = ("article", "text", "messages")


class CalibrationError(InputError):
    """Calibration data that is not there, not readable, or not enough."""


def check_reachable(settings: Calibration) -> str | None:
    """Asks the Hub for the dataset, so that a gated or misspelt one is refused before any work.

    Returns:
        A note when the Hub cannot be asked now (the dataset may still be in `datasets`' own cache), else None.

    Raises:
        CalibrationError: gated, or no such dataset.
    """
    import httpx
    from huggingface_hub import HfApi, errors

    try:
        HfApi().dataset_info(settings.dataset, timeout=5)
    except errors.GatedRepoError as error:
        raise CalibrationError(_unavailable(settings, "it is gated")) from error
    except errors.RepositoryNotFoundError as error:
        raise CalibrationError(_unavailable(settings, "the Hub shows you no such dataset")) from error
    except (errors.HfHubHTTPError, errors.OfflineModeIsEnabled, httpx.HTTPError, OSError):
        return (
            f"the Hub cannot be asked for {settings.dataset} now: the run will work only if `datasets` has it in its cache; "
            "--calibration PATH needs no Hub"
        )
    return None


def _unavailable(settings: Calibration, why: str) -> str:
    return (
        f"calibration dataset {settings.dataset} cannot be used: {why}. Ways out: --calibration PATH with your own text "
        "(.jsonl or .parquet with a column article, text or messages, or a folder saved by `datasets`); "
        "or log in with access: hf auth login."
    )


def check_path(path: Path, settings: Calibration) -> str:
    """The column of a local calibration set that will be used.

    Raises:
        CalibrationError: no such file, unknown kind, unreadable, or none of the known columns.
    """
    if path.suffix == ".jsonl":
        return _column(next(iter(_read_jsonl(path)), {}), path, settings)
    return _column(_open_table(path), path, settings)


def _column(columns: Iterable[str], path: Path, settings: Calibration) -> str:
    there = list(columns)
    for name in (settings.column, *COLUMNS):
        if name in there:
            return name
    raise CalibrationError(
        f"{path} has no column {settings.column!r} (nor {', '.join(c for c in COLUMNS if c != settings.column)}); "
        f"it has: {', '.join(there) or 'nothing'}."
    )


def documents_from_path(path: Path, settings: Calibration) -> Sequence[Any]:
    """The documents of a local set, in file order: strings, or lists of messages."""
    column = check_path(path, settings)
    if path.suffix == ".jsonl":
        return [_cell(row, column, path, number) for number, row in enumerate(_read_jsonl(path), 1)]
    return list(_open_table(path, read=True)[column])


def _cell(row: dict[str, Any], column: str, path: Path, number: int) -> Any:
    if column not in row:
        raise CalibrationError(f"{path}: row {number} has no {column!r}")
    return row[column]


def _read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    row = json.loads(line)
                    if not isinstance(row, dict):
                        raise CalibrationError(f"{path}: line {number} is not a JSON object")
                    yield row
    except OSError as error:
        raise CalibrationError(f"calibration data {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        if isinstance(error, CalibrationError):
            raise
        raise CalibrationError(f"{path}: not valid JSON lines: {error}") from error


def _open_table(path: Path, *, read: bool = False) -> Any:
    """Column names of a parquet file or a saved dataset; with `read`, a mapping of columns."""
    if path.suffix == ".parquet" and path.is_file():
        import pyarrow as pa
        from pyarrow import parquet

        try:
            return parquet.read_table(path).to_pydict() if read else parquet.read_schema(path).names
        except (OSError, pa.ArrowException) as error:
            raise CalibrationError(f"calibration data {path} cannot be read: {error}") from error
    if path.is_dir():
        return _saved_dataset(path, read=read)
    kind = "does not exist" if not path.exists() else "is neither .jsonl, .parquet nor a folder saved by `datasets`"
    raise CalibrationError(f"calibration data {path} {kind}.")


def _saved_dataset(path: Path, *, read: bool) -> Any:
    import datasets

    try:
        data = datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise CalibrationError(
            f"calibration data {path} is not a folder saved by `datasets` (save_to_disk): {error}"
        ) from error
    if isinstance(data, datasets.DatasetDict):
        data = data["train"] if "train" in data else next(iter(data.values()))
    return data if read else data.column_names


def documents_from_hub(settings: Calibration) -> Sequence[Any]:
    """The documents of the recipe's dataset, through `datasets`.

    Raises:
        CalibrationError: gated, absent, offline, or without the column; with the ways out.
    """
    import datasets

    datasets.disable_progress_bars()
    try:
        data = datasets.load_dataset(settings.dataset, settings.config, split=settings.split)
    except (datasets.exceptions.DatasetNotFoundError, ConnectionError, OSError, ValueError) as error:
        raise CalibrationError(_unavailable(settings, " ".join(str(error).split())[:300])) from error
    if settings.column not in data.column_names:
        raise CalibrationError(
            f"calibration dataset {settings.dataset} has no column {settings.column!r}; it has: {', '.join(data.column_names)}."
        )
    return data[settings.column]  # type: ignore[no-any-return]


def pack_rows(
    documents: Sequence[Any], tokenizer: Any, settings: Calibration, *, progress: Any = None
) -> npt.NDArray[np.int32]:
    """Token rows [num_samples, sequence_length], int32.

    Raises:
        CalibrationError: the documents hold fewer tokens than asked for.
    """
    length = settings.sequence_length
    wanted = settings.num_samples * length
    tokens: list[int] = []
    used = 0
    for i in np.random.default_rng(settings.seed).permutation(len(documents)):
        before = len(tokens)
        tokens += _tokenize(documents[int(i)], tokenizer)
        used += 1
        if progress:
            progress(min(wanted, len(tokens)) - min(wanted, before))
        if len(tokens) >= wanted:
            return np.array(tokens[:wanted], dtype=np.int32).reshape(settings.num_samples, length)
    raise CalibrationError(
        f"fewer calibration tokens than asked: {used} documents hold {len(tokens)} tokens, the recipe asks for "
        f"{settings.num_samples} rows of {length} ({wanted} tokens). Give more text, or a recipe with a smaller num_samples."
    )


def _tokenize(document: Any, tokenizer: Any) -> list[int]:
    text = document
    if isinstance(document, list):
        text = tokenizer.apply_chat_template(document, tokenize=False)
    if not isinstance(text, str):
        raise CalibrationError(f"a calibration document is {type(document).__name__}, expected text or a list of messages")
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    return ids if tokenizer.eos_token_id is None else [*ids, tokenizer.eos_token_id]


def rows_sha256(rows: npt.NDArray[np.int32]) -> str:
    """The SHA-256 of the token ids (shape, then little-endian int32, row-major), in hexadecimal."""
    return hashlib.sha256(repr(rows.shape).encode() + rows.astype("<i4").tobytes()).hexdigest()
