"""Calibration rows: text into full blocks of tokens.

Documents are put in a seeded order, tokenized, joined with the end-of-text token, and cut into rows of equal length.
No row is padded, so no padding token is ever measured.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from assemble.errors import InputError
from recipes.schema import Calibration

COLUMNS = ("article", "text", "messages")
AT_ONCE = 32  # documents that the tokenizer is given at once


class CalibrationError(InputError):
    """Calibration data that is not there, not readable, or not enough."""


def check_reachable(settings: Calibration) -> str | None:
    """Asks the Hub for the dataset, so that a gated or misspelt one is refused before any work.

    Returns:
        A note when the Hub cannot be asked now (the dataset may still be in `datasets`' own cache), else None.

    Raises:
        CalibrationError: gated, no such dataset, or a token that the Hub refuses.
    """
    import httpx
    from huggingface_hub import HfApi, errors

    try:
        hub = HfApi()
        hub.dataset_info(settings.dataset, timeout=5)  # auth_check knows no timeout, so this asks first
        hub.auth_check(settings.dataset, repo_type="dataset")  # the metadata of a gated dataset is public: ask for its files
    except errors.GatedRepoError as error:
        raise CalibrationError(_unavailable(settings, "it is gated")) from error
    except errors.RepositoryNotFoundError as error:
        raise CalibrationError(_unavailable(settings, "the Hub shows you no such dataset")) from error
    except errors.HFValidationError as error:
        raise CalibrationError(_unavailable(settings, str(error))) from error
    except (httpx.HTTPError, OSError) as error:
        if isinstance(error, errors.HfHubHTTPError) and error.response.status_code == 401:
            raise CalibrationError(_unavailable(settings, "the Hub refuses your token (HF_TOKEN)")) from error
        return (
            f"the Hub cannot be asked for {settings.dataset} now: the run will work only if `datasets` has it in its cache; "
            "--calibration PATH needs no Hub"
        )
    return None


def _unavailable(settings: Calibration, why: str) -> str:
    return (
        f"calibration dataset {settings.dataset} cannot be used: {' '.join(why.split())[:300].rstrip('. ')}. "
        "Ways out: --calibration PATH with your own text (.jsonl or .parquet with a column article, text or messages, or a "
        "folder saved by `datasets`); or log in with access: hf auth login."
    )


def check_path(path: Path, settings: Calibration) -> str:
    """The column of a local calibration set that will be used: the recipe's, or else the first known one that is there.

    Raises:
        CalibrationError: no such file, unknown kind, unreadable, no rows, or none of the known columns.
    """
    if path.suffix == ".jsonl":
        first = next(_read_jsonl(path), None)
        if first is None:
            raise CalibrationError(f"calibration data {path} holds no rows. Give a file with text in it.")
        return _column(first, path, settings)
    return _column(_open_table(path), path, settings)


def _column(columns: Iterable[str], path: Path, settings: Calibration) -> str:
    there = list(columns)
    for name in (settings.column, *COLUMNS):
        if name in there:
            return name
    raise CalibrationError(
        f"{path} has no column {settings.column!r} (nor {', '.join(c for c in COLUMNS if c != settings.column)}); "
        f"it has: {', '.join(there) or 'nothing'}. Rename the one that holds the text."
    )


def documents_from_path(path: Path, settings: Calibration) -> Sequence[Any]:
    """The documents of a local set, in file order: strings, or lists of messages.

    Raises:
        CalibrationError: as `check_path`, or a line of a jsonl file that is broken or lacks the column.
    """
    column = check_path(path, settings)
    if path.suffix == ".jsonl":
        return [_cell(row, column, path, number) for number, row in enumerate(_read_jsonl(path), 1)]
    return _open_table(path, read=column)  # type: ignore[no-any-return]


def _cell(row: dict[str, Any], column: str, path: Path, number: int) -> Any:
    if column not in row:
        raise CalibrationError(
            f"{path}: row {number} has no {column!r}, which the first row has. Give every row the same keys."
        )
    return row[column]


def _read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _parse_line(line, f"{path}: line {number}")
    except OSError as error:
        raise CalibrationError(f"calibration data {path} cannot be read: {error.strerror}.") from error


def _parse_line(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8-sig"))  # some editors begin a file with a byte order mark
    except UnicodeDecodeError as error:
        raise CalibrationError(f"{where} is not UTF-8 text. Save the file as UTF-8.") from error
    except (ValueError, RecursionError) as error:
        raise CalibrationError(f"{where} is not valid JSON ({error}). A .jsonl file holds one JSON object a line.") from error
    if not isinstance(row, dict):
        raise CalibrationError(f'{where} is not a JSON object, but {type(row).__name__}. Write it as {{"text": …}}.')
    return row


def _open_table(path: Path, *, read: str | None = None) -> Any:
    """Column names of a parquet file or a saved dataset; with `read`, the values of that column."""
    if path.suffix == ".parquet" and path.is_file():
        import pyarrow as pa
        from pyarrow import parquet

        try:
            return parquet.read_table(path, columns=[read])[read].to_pylist() if read else parquet.read_schema(path).names
        except (OSError, pa.ArrowException) as error:
            raise CalibrationError(f"calibration data {path} is not a readable parquet file: {error}.") from error
    if path.is_dir():
        data = _saved_dataset(path)
        return data[read] if read else data.column_names
    kind = "does not exist" if not path.exists() else "is neither .jsonl, .parquet nor a folder saved by `datasets`"
    raise CalibrationError(
        f"calibration data {path} {kind}. Check the path, or write one JSON object a line into a .jsonl file."
    )


def _saved_dataset(path: Path) -> Any:
    """A saved dataset; of one with several splits `train`, or the first."""
    import datasets

    try:
        data = datasets.load_from_disk(str(path))
    except (OSError, ValueError, KeyError, TypeError) as error:
        text = " ".join(str(error).split())
        raise CalibrationError(f"calibration data {path} is not a folder saved by `datasets` (save_to_disk): {text}") from error
    if isinstance(data, datasets.DatasetDict):
        if not data:
            raise CalibrationError(f"calibration data {path} holds no split. Save it again with one.")
        data = data["train"] if "train" in data else next(iter(data.values()))
    return data


def documents_from_hub(settings: Calibration) -> tuple[Sequence[Any], str | None]:
    """The documents of the recipe's dataset, through `datasets`, and the commit that they are of (None: not known).

    Raises:
        CalibrationError: gated, absent, offline, or without the column; with the ways out.
    """
    import datasets
    import httpx

    datasets.disable_progress_bars()
    try:
        data = datasets.load_dataset(settings.dataset, settings.config, split=settings.split)
    except (datasets.exceptions.DatasetsError, httpx.HTTPError, OSError, ValueError, RuntimeError) as error:
        raise CalibrationError(_unavailable(settings, str(error))) from error
    if settings.column not in data.column_names:
        raise CalibrationError(
            f"calibration dataset {settings.dataset} has no column {settings.column!r}; it has: "
            f"{', '.join(data.column_names)}. Correct `column` in the recipe, or use --calibration PATH."
        )
    # datasets 5.2 keeps a Hub dataset in …/CONFIG/VERSION/COMMIT/NAME.arrow (load.py: the builder's hash is the commit).
    folders = {Path(file["filename"]).parent.name for file in data.cache_files}
    commits = [name for name in folders if re.fullmatch(r"[0-9a-f]{40}", name)]
    return data[settings.column], commits[0] if len(commits) == 1 else None


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
    order = np.random.default_rng(settings.seed).permutation(len(documents))
    for ids in _ids_of_each(documents, map(int, order), tokenizer):
        before = len(tokens)
        tokens += ids
        if tokenizer.eos_token_id is not None:
            tokens.append(tokenizer.eos_token_id)
        used += 1
        if progress:
            progress(min(wanted, len(tokens)) - min(wanted, before))
        if len(tokens) >= wanted:
            return np.array(tokens[:wanted], dtype=np.int32).reshape(settings.num_samples, length)
    raise CalibrationError(
        f"fewer calibration tokens than asked: {used} documents hold {len(tokens)} tokens, the recipe asks for "
        f"{settings.num_samples} rows of {length} ({wanted} tokens). Give more text, or a recipe with a smaller num_samples."
    )


def document_ids(document: Any, tokenizer: Any, number: int) -> list[int]:
    """The token ids of a document: text, or a list of messages through the model's chat template; no end-of-text token.

    Args:
        document: One value of the column.
        tokenizer: The model's.
        number: Which row of the data it is, for messages.

    Raises:
        CalibrationError: neither text nor messages.
    """
    return list(tokenizer(_text(document, tokenizer, number), add_special_tokens=False)["input_ids"])


def _ids_of_each(documents: Sequence[Any], order: Iterable[int], tokenizer: Any) -> Iterator[list[int]]:
    """The token ids of the documents, in this order: several are given to the tokenizer at once, which uses all cores."""
    order = iter(order)
    while some := list(islice(order, AT_ONCE)):
        texts: list[str] = []
        error: CalibrationError | None = None
        for i in some:
            try:
                texts.append(_text(documents[i], tokenizer, i + 1))
            except CalibrationError as raised:  # it counts when it is come to
                error = raised
                break
        if texts:
            yield from tokenizer(texts, add_special_tokens=False)["input_ids"]
        if error:
            raise error


def _text(document: Any, tokenizer: Any, number: int) -> str:
    text = _render(document, tokenizer, number) if isinstance(document, list) else document
    if not isinstance(text, str):
        raise CalibrationError(
            f"row {number} of the calibration data holds {document!r:.40}, expected text or a list of messages. "
            "Remove the row, or name another column in the recipe."
        )
    return text


def _render(messages: list[Any], tokenizer: Any, number: int) -> Any:
    """The messages as one text. A chat template is the model's own program, so its errors can be of many kinds."""
    import jinja2

    if not tokenizer.chat_template:
        raise CalibrationError(
            f"row {number} of the calibration data is a list of messages, and the model has no chat template to write them "
            "with. Give plain text in a column text."
        )
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False)
    except (ValueError, TypeError, KeyError, AttributeError, jinja2.TemplateError) as error:
        raise CalibrationError(
            f"row {number} of the calibration data is not messages that the model's chat template takes: "
            f"{' '.join(str(error).split())[:300]}. Give messages as objects with role and content, or a column of plain text."
        ) from error


def check_vocabulary(rows: npt.NDArray[np.int32], vocab_size: int) -> None:
    """Refuses tokens that the model has no embedding for.

    Raises:
        CalibrationError: the tokenizer is not this model's.
    """
    if int(rows.max()) >= vocab_size:
        raise CalibrationError(
            f"the tokenizer gives token {int(rows.max())}, but the model's vocab_size is {vocab_size}: it is another model's. "
            "Put the tokenizer's own files into the model's directory."
        )


def rows_sha256(rows: npt.NDArray[np.int32]) -> str:
    """The SHA-256 of the token ids (shape, then little-endian int32, row-major), in hexadecimal."""
    return hashlib.sha256(repr(rows.shape).encode() + rows.astype("<i4").tobytes()).hexdigest()
