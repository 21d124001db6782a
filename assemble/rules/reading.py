"""Reads the checkpoint that is to be verified: headers and configs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from assemble.architecture import Architecture, ConfigError, read_architecture
from assemble.checkpoint import Checkpoint, read_json, read_layout
from assemble.jsonfile import JSONFileError
from assemble.reader import LocalReader, Reader
from assemble.rules.subject import Subject


def read_subject(
    root: Path,
    source: Checkpoint | None = None,
    head: Checkpoint | None = None,
    deep: bool = False,
    tensor_parallel: int = 1,
    require_mtp: bool = False,
    reader: Reader | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> Subject:
    """Reads headers and configs; what cannot be read is noted for the rules to report. Arguments as in `verify`."""
    unread: dict[str, str] = {}
    config = _read_config(root, "config.json", unread) or {}
    twin = _read_config(root, "hf_quant_config.json", unread)
    layout = read_layout(root)
    tensors = {t.name: t for s in layout.shards for t in s.tensors}
    known: Architecture | ConfigError
    if "config.json" not in unread and not (root / "config.json").is_file():
        unread["config.json"] = "absent"
    try:
        known = read_architecture(config, tensors)
    except ConfigError as error:
        known = error
    reader = reader or LocalReader(root)
    return Subject(
        root, reader, layout, tensors, config, twin, known, unread, source, head, tensor_parallel, require_mtp, deep, progress
    )


def _read_config(root: Path, name: str, unread: dict[str, str]) -> dict[str, Any] | None:
    try:
        return read_json(root, name)
    except JSONFileError as error:
        unread[name] = str(error)
        return None
