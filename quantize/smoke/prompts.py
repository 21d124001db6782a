"""What the smoke test generates from: the user's text, or sixteen prompts of our own."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from assemble.errors import InputError

NUM_PROMPTS = 16
CUT_TOKENS = 256  # of a text; enough to see the model in its stride, and little enough for any card
BUNDLED = Path(__file__).parent / "prompts.json"
FORMS = ("prompt_token_ids", "messages", "text", "prompt")


def bundled_prompts() -> list[dict[str, Any]]:
    """Sixteen short questions of our own, to be rendered through the checkpoint's chat template."""
    questions = json.loads(BUNDLED.read_text(encoding="utf-8"))
    return [{"messages": [{"role": "user", "content": question}]} for question in questions]


def read_prompts(path: Path, column: str = "text") -> list[dict[str, Any]]:
    """The first sixteen prompts of a JSON-lines file.

    A line is an object with `messages` (rendered through the chat template), `prompt_token_ids`, or text under `text`,
    `prompt` or `column`. Text is cut to 256 tokens and goes on to the full length: it has no natural end. `nll`, where a
    line has it, is the predicted mean negative log-likelihood of its tokens but the first, in nats.

    Raises:
        InputError: no such file, or a line that is none of these.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"prompts {path} cannot be read: {error}. Give a JSON-lines file.") from error
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()][:NUM_PROMPTS]
    if not numbered:
        raise InputError(f"prompts {path} is empty. Give one JSON object a line, with text, messages or prompt_token_ids.")
    return [_prompt(line, column, f"{path}:{number}") for number, line in numbered]


def _prompt(line: str, column: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{where} is not JSON ({error}). One object a line is expected.") from error
    if not isinstance(row, dict):
        raise InputError(f"{where} is a {type(row).__name__}, expected an object.")
    prompt = _form(row, column, where)
    if isinstance(row.get("nll"), (int, float)):
        prompt["nll"] = float(row["nll"])
    return prompt


def _form(row: Mapping[str, Any], column: str, where: str) -> dict[str, Any]:
    ids, messages = row.get("prompt_token_ids"), row.get("messages")
    if isinstance(ids, list) and len(ids) > 1 and all(isinstance(i, int) and i >= 0 for i in ids):
        return {"prompt_token_ids": ids, "ignore_eos": True}
    if isinstance(messages, list) and messages and all(isinstance(m, dict) and "role" in m for m in messages):
        return {"messages": messages}
    text = next((row[key] for key in ("text", "prompt", column) if isinstance(row.get(key), str) and row[key]), None)
    if text is None:
        raise InputError(
            f"{where} has none of {', '.join(FORMS)} or {column!r} in a usable form (keys found: {', '.join(row) or 'none'})."
        )
    return {"text": text, "cut_tokens": CUT_TOKENS, "ignore_eos": True}
