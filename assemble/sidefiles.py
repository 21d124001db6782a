"""The files beside the weights: which belong to a checkpoint, and which a source must have.

Only files named here are taken over; a base model's README, its figures and whatever else lies in its folder stay.
"""

import math
from pathlib import Path

from assemble.architecture import Architecture
from assemble.checkpoint import LINK_OUT, read_json, stays_inside
from assemble.errors import InputError
from assemble.jsonfile import JSONFileError

TOKENIZER = "tokenizer.json"
SIDE_FILES = (
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
    "LICENSE",
)
# Files that make vLLM take a checkpoint for another kind.
MISLEADING = ("consolidated*.safetensors", "joint_head_config.json", "decision_config.json", "modules.json")


class SideFileError(InputError):
    """A file beside the weights that is absent or that would stop the run later."""


def side_files(root: Path) -> list[str]:
    """The side files that `root` has, in the order of `SIDE_FILES`.

    A link that leads out of the folder is none: what it leads to, a private key say, would be copied and published.
    """
    return [name for name in SIDE_FILES if (root / name).is_file() and stays_inside(root / name)]


def linked_out(root: Path) -> list[str]:
    """The side files of `root` that are links out of the folder."""
    return [name for name in SIDE_FILES if (root / name).is_file() and not stays_inside(root / name)]


def check_side_files(root: Path, architecture: Architecture) -> list[str]:
    """Refuses what would fail hours later, and names what serving would miss.

    Returns:
        One sentence for each file that is absent though serving wants it.

    Raises:
        SideFileError: no tokenizer, a generation_config.json with values that cannot be, or a link out of the folder.
    """
    present = set(side_files(root))
    if linked := linked_out(root):
        raise SideFileError(f"{root / linked[0]} is {LINK_OUT}. Put the file itself there.")
    if TOKENIZER not in present or "tokenizer_config.json" not in present:
        absent = TOKENIZER if TOKENIZER not in present else "tokenizer_config.json"
        raise SideFileError(
            f"{root} has no {absent}: without the tokenizer nothing can be calibrated or served. Copy it there."
        )
    check_generation_config(root)
    notes = []
    if "generation_config.json" not in present:
        notes.append("generation_config.json is absent: servers use their own sampling defaults")
    tokenizer_config = read_json(root, "tokenizer_config.json") or {}
    if not present & {"chat_template.jinja", "chat_template.json"} and "chat_template" not in tokenizer_config:
        notes.append("no chat template: /v1/chat/completions will not work")
    pair = {"preprocessor_config.json", "video_preprocessor_config.json"}
    if architecture.wrapped and "processor_config.json" not in present and not pair <= present:
        notes.append("no image processor files: serve with --language-model-only")
    return notes


def check_generation_config(root: Path) -> None:
    """Refuses a generation_config.json that transformers would refuse to save, after hours of work.

    Raises:
        SideFileError: not a JSON object, or a value that cannot be. An absent file is fine.
    """
    path = root / "generation_config.json"
    try:
        config = read_json(root, path.name) or {}
    except JSONFileError as error:
        raise SideFileError(f"{error}. Fix it, or delete it.") from error
    for key, (text, low, high) in _RANGES.items():
        value = config.get(key)
        if value is not None and not (_is_number(value) and low <= value <= high):
            raise SideFileError(f"{path}: {key} must be {text}, found {value!r}. Fix it, or delete the key.")


_RANGES: dict[str, tuple[str, float, float]] = {
    "temperature": ("a number of at least 0", 0, math.inf),
    "top_p": ("a number from 0 to 1", 0, 1),
    "top_k": ("a number of at least 0", 0, math.inf),
    "max_new_tokens": ("a number of at least 1", 1, math.inf),
}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
