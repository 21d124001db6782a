"""Reading and writing the JSON files of a checkpoint."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from assemble.errors import InputError
from assemble.wholefile import write_whole


class JSONFileError(InputError):
    """A JSON file that is absent, unreadable, not JSON, or not an object."""


def reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An `object_pairs_hook` that refuses a key given twice (Python's default keeps the last one in silence)."""
    result = dict(pairs)
    if len(result) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"key {twice!r} appears twice")
    return result


def parse_object(text: bytes, where: str) -> dict[str, Any]:
    """Parses one JSON object.

    Raises:
        JSONFileError: not UTF-8, not JSON, not an object, or a key twice. `where` names it in the text.
    """
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=reject_duplicates)
    except (ValueError, RecursionError) as error:
        raise JSONFileError(f"{where} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise JSONFileError(f"{where} must hold a JSON object, found {type(value).__name__}")
    return value


def read_object(path: Path) -> dict[str, Any]:
    """Reads a file that holds one JSON object.

    Raises:
        JSONFileError: as `parse_object`, or the file cannot be read.
    """
    try:
        return parse_object(path.read_bytes(), str(path))
    except OSError as error:
        raise JSONFileError(f"{path} cannot be read: {error.strerror}") from error


def write_object(path: Path, value: Any) -> None:
    """Writes JSON under its final name only when it is whole."""
    write_whole(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")
