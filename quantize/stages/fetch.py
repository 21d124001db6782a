"""fetch: the model, the head's checkpoint and the calibration data become local, and their content is hashed.

The model's shards are left to be hashed in the background: see `hashing.py`.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from assemble.architecture import MTP_PREFIX
from assemble.card.metadata import base_metadata
from assemble.checkpoint import Checkpoint
from assemble.errors import InputError
from assemble.writer import sha256_tensor
from quantize import hashing
from quantize.hashing import Entry, digest, label, stamp, stamp_of
from quantize.source import SMALL_FILES, Source, fetch
from quantize.stage import Context, Record, Result, read_record


def run(context: Context) -> Result:
    """Makes the inputs local and hashes them; an unchanged file (size and times) keeps its hash."""
    request = context.request
    model = fetch(request.model, request.revision)
    files = {f"model/{p.name}": p for p in _model_files(model.root)}
    if request.calibration:
        files |= _calibration_files(request.calibration)
    known = dict(context.previous.facts.get("hashed", {})) if context.previous else {}
    hashed = _hash(files, known, context)
    outputs = {name: label(entry) for name, entry in hashed.items()}
    facts: dict[str, Any] = {"model": _facts(model), "hashed": hashed, "head": None}
    if request.mtp_from:
        head = fetch(request.mtp_from, None)
        origin = Checkpoint.open(head.root)
        tensors = [t for name, t in origin.items() if name.startswith(MTP_PREFIX)]
        facts["head"] = _facts(head) | {"files": [stamp(path) for path in sorted({origin.path_of(t) for t in tensors})]}
        outputs |= {f"head/{t.name}": sha256_tensor(origin.path_of(t), t) for t in tensors}
    return Result(outputs, facts)


def opened(record: Record) -> tuple[Checkpoint, Checkpoint]:
    """The fetched model, and the checkpoint that its head is taken from (the model itself unless another was given)."""
    source = Checkpoint.open(Path(record.facts["model"]["root"]))
    head = record.facts["head"]
    return source, Checkpoint.open(Path(head["root"])) if head else source


def _facts(source: Source) -> dict[str, Any]:
    return {
        "name": source.public_name,
        "root": str(source.root),
        "revision": source.revision,
        "metadata": base_metadata(source.root),
    }


def _model_files(root: Path) -> list[Path]:
    checkpoint = Checkpoint.open(root)
    small = [root / name for name in SMALL_FILES if (root / name).is_file()]
    return small + [root / shard.name for shard in checkpoint.shards]


def _calibration_files(path: Path) -> dict[str, Path]:
    if not path.exists():
        raise InputError(f"calibration data {path} does not exist.")
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    return {f"calibration/{p.name if p == path else p.relative_to(path)}": p for p in files}


def _hash(files: Mapping[str, Path], known: Mapping[str, Entry], context: Context) -> dict[str, Entry]:
    """Size, times and digest of each file. A shard is left without, as long as no later stage needs it."""
    quantized = read_record(context.directory_of("quantize")) is not None
    hashed: dict[str, Entry] = {}
    todo = []
    for name, path in files.items():
        entry, before = {**stamp(path), "digest": ""}, known.get(name)
        if before and stamp_of(before) == stamp_of(entry):
            entry["digest"] = before["digest"]
        hashed[name] = entry
        changed = before and before["digest"]  # only its content says whether it is still the one on record
        later = name.startswith("model/") and path.suffix == ".safetensors" and not (quantized or changed)
        if not (entry["digest"] or later):
            todo.append(name)
    with context.reporter.task("hash the inputs", sum(hashed[n]["bytes"] for n in todo)) as progress:
        for name in todo:
            hashed[name]["digest"] = digest(files[name], partial(progress, reached=name.removeprefix("model/")))
    return hashed


def check_unchanged(record: Record) -> None:
    """Refuses a model, or a head's checkpoint, that was changed since: it is not the one on record.

    Raises:
        InputError: names the first file.
    """
    _check_unchanged(record, "model/")
    for entry in (record.facts["head"] or {}).get("files", []):
        hashing.check_unchanged(entry)


def check_calibration_unchanged(record: Record) -> None:
    """Refuses the user's own text, where it was changed since.

    Raises:
        InputError: names the first file.
    """
    _check_unchanged(record, "calibration/")


def _check_unchanged(record: Record, prefix: str) -> None:
    for name, entry in record.facts["hashed"].items():
        if name.startswith(prefix):
            hashing.check_unchanged(entry)
