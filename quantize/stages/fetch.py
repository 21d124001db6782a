"""fetch: the model, the head's checkpoint and the calibration data become local, and their content is hashed.

Shards are hashed with BLAKE3, which uses all cores on one file; everything else with SHA-256. Both are of the whole content.
"""

import os
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from assemble.architecture import MTP_PREFIX
from assemble.card.metadata import base_metadata
from assemble.checkpoint import Checkpoint
from assemble.errors import InputError
from assemble.writer import sha256_file, sha256_tensor
from quantize.source import SMALL_FILES, Source, fetch
from quantize.stage import Context, Record, Result

PIECE = 16 * 1024 * 1024  # of a shard
READERS = min(6, os.cpu_count() or 1)  # one thread copies some 3 GB/s out of the page cache, and BLAKE3 hashes faster than that


def run(context: Context) -> Result:
    """Makes the inputs local and hashes them; an unchanged file (size and times) keeps its hash."""
    request = context.request
    model = fetch(request.model, request.revision)
    files = {f"model/{p.name}": p for p in _model_files(model.root)}
    if request.calibration:
        files |= _calibration_files(request.calibration)
    known = dict(context.previous.facts.get("hashed", {})) if context.previous else {}
    hashed = _hash(files, known, context)
    outputs = {name: entry["digest"] for name, entry in hashed.items()}
    facts: dict[str, Any] = {"model": _facts(model), "hashed": hashed, "head": None}
    if request.mtp_from:
        head = fetch(request.mtp_from, None)
        facts["head"] = _facts(head)
        origin = Checkpoint.open(head.root)
        tensors = [t for name, t in origin.items() if name.startswith(MTP_PREFIX)]
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


def _hash(files: Mapping[str, Path], known: Mapping[str, Any], context: Context) -> dict[str, Any]:
    """Size, times and SHA-256 of each file."""
    hashed: dict[str, Any] = {}
    for name, path in files.items():
        stamp = _stamp(path)
        entry = known.get(name, {})
        same = all(entry.get(key) == value for key, value in stamp.items())
        hashed[name] = stamp | {"digest": entry["digest"] if same else ""}
    todo = [name for name, entry in hashed.items() if not entry["digest"]]
    total = sum(hashed[n]["bytes"] for n in todo)
    with context.reporter.task("hash the inputs", total) as progress:
        for name in todo:
            hashed[name]["digest"] = _digest(files[name])
            progress(hashed[name]["bytes"], name.removeprefix("model/"))
    return hashed


def _stamp(path: Path) -> dict[str, int]:
    status = path.stat()
    # ctime too: a copy that keeps times (cp -p, rsync -t) sets mtime, and nothing but a change of the file sets ctime.
    return {"bytes": status.st_size, "mtime_ns": status.st_mtime_ns, "ctime_ns": status.st_ctime_ns}


def check_unchanged(record: Record) -> None:
    """Refuses a model that was changed since it was hashed, by a download that goes on, say: it is not the one on record.

    Raises:
        InputError: names the first.
    """
    root = Path(record.facts["model"]["root"])
    for name, entry in record.facts["hashed"].items():
        path = root / name.removeprefix("model/")
        if name.startswith("model/") and _stamp(path) != {key: entry[key] for key in ("bytes", "mtime_ns", "ctime_ns")}:
            raise InputError(f"{path} was changed while it was read. Start over when nothing writes to it: remove OUT.run.")


def _digest(path: Path) -> str:
    return f"blake3:{_blake3(path)}" if path.suffix == ".safetensors" else sha256_file(path)


def _blake3(path: Path) -> str:
    """Read and not mapped: a mapped file counts as this process's memory, and kills it when it is cut short meanwhile."""
    from blake3 import blake3

    digest, size = blake3(max_threads=blake3.AUTO), path.stat().st_size
    buffers = [bytearray(min(PIECE, size)) for _ in range(READERS + 1)]  # one is hashed while the others are filled
    with path.open("rb", buffering=0) as file, ThreadPoolExecutor(READERS) as pool:

        def read(number: int) -> memoryview:
            count = os.preadv(file.fileno(), [buffers[number % len(buffers)]], number * PIECE)
            return memoryview(buffers[number % len(buffers)])[:count]

        count = -(-size // PIECE)
        coming = deque(pool.submit(read, i) for i in range(min(READERS, count)))
        for i in range(count):
            piece = coming.popleft().result()
            if i + READERS < count:
                coming.append(pool.submit(read, i + READERS))
            digest.update(piece)
    return str(digest.hexdigest())
