"""The serve commands of the card: those of the shipped profiles whose card class the checkpoint fits."""

from pathlib import Path
from typing import Any

from assemble.errors import InputError

MODEL_WORD = "__MODEL__"  # stands for the checkpoint's name in recorded commands: any shell takes it without quotes


def serve_entries(root: Path) -> list[dict[str, Any]]:
    """One entry a fitting profile, with `MODEL_WORD` in the place of the checkpoint's name. Headers and configs only."""
    from assemble.serve import commands_that_fit

    try:
        fitting_commands = commands_that_fit(root, model=MODEL_WORD)
    except InputError:  # sound, and of a kind that the profiles do not know
        return []
    return [
        {
            "profile": fitting.profile,
            "title": fitting.title,
            "command": fitting.command,
            "max_context": fitting.max_context,
            "concurrency": round(fitting.concurrency, 1),
            "vllm": fitting.vllm,
        }
        for fitting in fitting_commands
    ]
