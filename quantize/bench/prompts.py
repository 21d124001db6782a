"""The prompts of a benchmark, by category."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from assemble.errors import InputError

BUNDLED = Path(__file__).parent / "prompts.jsonl"
ALL = "all"  # the category of a prompt that names none


def read_categories(path: Path = BUNDLED) -> dict[str, list[str]]:
    """Category -> prompts, in the order of the file.

    A line is an object with `prompt` (or `turns`, of which the first is taken, as in Spec-Bench), and optionally `category`.

    Raises:
        InputError: no such file, or a line that is not so.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"prompts {path} cannot be read: {error}. Give a JSON-lines file.") from error
    categories: dict[str, list[str]] = {}
    for number, line in enumerate(lines, 1):
        if line.strip():
            category, prompt = _entry(line, f"{path}:{number}")
            categories.setdefault(category, []).append(prompt)
    if not categories:
        raise InputError(f'prompts {path} is empty. Give one object a line: {{"category": "qa", "prompt": "..."}}.')
    return categories


def _entry(line: str, where: str) -> tuple[str, str]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{where} is not JSON ({error}). One object a line is expected.") from error
    prompt = _prompt(row) if isinstance(row, dict) else None
    if not isinstance(prompt, str) or not prompt.strip():
        raise InputError(f'{where} has no prompt. One object a line is expected: {{"category": "qa", "prompt": "..."}}.')
    return str(row.get("category") or ALL), prompt


def _prompt(row: Mapping[str, Any]) -> Any:
    turns = row.get("turns")
    return row.get("prompt") or (turns[0] if isinstance(turns, list) and turns else None)
