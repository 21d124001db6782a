"""Compares two checkpoints by meaning: tensors, configs field by field, side files. Streams; memory stays bounded."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from assemble.checkpoint import INDEX, TensorInfo
from assemble.mend.found import CONFIG, TWIN, Found, read_found
from assemble.plan import natural
from assemble.writer import Progress, read_chunks, sha256_file

LAYOUT = "place"  # the one kind of difference that is not one of content


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference.

    Attributes:
        kind: `tensor` (in one only), `dtype`, `shape`, `bytes`, `place`, `config` or `file`.
        where: The tensor, field or file.
        a: What the first has.
        b: What the second has.
    """

    kind: str
    where: str
    a: str
    b: str


def compare(a: Path, b: Path, progress: Progress = lambda _: None) -> Iterator[Difference]:
    """Yields every difference: tensors in natural order, then configs, then other files.

    Args:
        a: One checkpoint's directory.
        b: The other's.
        progress: Called with the tensor bytes compared.

    Raises:
        InputError: not a checkpoint's directory.
    """
    one, other = read_found(a), read_found(b)
    yield from _tensors(one, other, progress)
    for name, mine, theirs in ((CONFIG, one.config, other.config), (TWIN, one.twin, other.twin)):
        if (mine is None) != (theirs is None):
            yield Difference("file", name, _presence(one, name, mine), _presence(other, name, theirs))
        elif mine is not None and theirs is not None:
            yield from _fields(name, mine, theirs)
    yield from _files(one, other)


def verdict(differences: list[Difference]) -> str:
    """The comparison in one line."""
    if not differences:
        return "equal"
    if all(d.kind == LAYOUT for d in differences):
        return f"the same content, laid out differently: {len(differences)} tensors lie in other shards"
    counts = {kind: sum(d.kind == kind for d in differences) for kind in dict.fromkeys(d.kind for d in differences)}
    words = {"tensor": "tensors in one only", "config": "config fields", "file": "files", LAYOUT: "places"}
    return "different: " + ", ".join(f"{n} {words.get(kind, f'tensors in {kind}')}" for kind, n in counts.items())


def _tensors(one: Found, other: Found, progress: Progress) -> Iterator[Difference]:
    mine, theirs = _chosen(one), _chosen(other)
    for name in sorted(mine.keys() | theirs.keys(), key=natural):
        left, right = mine.get(name), theirs.get(name)
        if left is None or right is None:
            yield Difference("tensor", name, _describe(left), _describe(right))
            continue
        if left.dtype != right.dtype:
            yield Difference("dtype", name, _describe(left), _describe(right))
        elif left.shape != right.shape:
            yield Difference("shape", name, _describe(left), _describe(right))
        elif count := _differing_bytes(one.path_of(left), left, other.path_of(right), right):
            yield Difference("bytes", name, f"{count} of {left.nbytes} bytes differ", "")
        progress(left.nbytes)
        if left.shard != right.shard:
            yield Difference(LAYOUT, name, left.shard, right.shard)


def _chosen(found: Found) -> dict[str, TensorInfo]:
    """Of a tensor stored twice, the copy that the index names, or the first."""
    mapped = found.weight_map
    return {n: next((t for t in copies if t.shard == mapped.get(n)), copies[0]) for n, copies in found.copies.items()}


def _describe(tensor: TensorInfo | None) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}" if tensor else "absent"


def _differing_bytes(left: Path, a: TensorInfo, right: Path, b: TensorInfo) -> int:
    """How many bytes differ; hard links to one file are not read."""
    if a.start == b.start and left.samefile(right):
        return 0
    total = 0
    for mine, theirs in zip(read_chunks(left, a), read_chunks(right, b), strict=True):
        if mine != theirs:
            total += int(np.count_nonzero(np.frombuffer(mine, np.uint8) != np.frombuffer(theirs, np.uint8)))
    return total


def _fields(where: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Difference]:
    for key in dict.fromkeys((*a, *b)):
        left, right = a.get(key, _ABSENT), b.get(key, _ABSENT)
        path = f"{where}[{key}]" if "." in key else f"{where}: {key}" if ":" not in where else f"{where}.{key}"
        if isinstance(left, dict) and isinstance(right, dict):
            yield from _fields(path, left, right)
        elif left != right or type(left) is not type(right):
            yield Difference("config", path, _short(left), _short(right))


_ABSENT = object()


def _short(value: Any) -> str:
    if value is _ABSENT:
        return "absent"
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}…"


def _presence(found: Found, name: str, value: object) -> str:
    return "present" if value is not None else f"unreadable: {found.broken[name]}" if name in found.broken else "absent"


def _files(one: Found, other: Found) -> Iterator[Difference]:
    names = [{p.name for p in found.root.iterdir() if p.is_file() and _is_side_file(p.name)} for found in (one, other)]
    for name in sorted(names[0] | names[1]):
        if name not in names[0] or name not in names[1]:
            yield Difference("file", name, *("present" if name in n else "absent" for n in names))
            continue
        left, right = (sha256_file(found.root / name) for found in (one, other))
        if left != right:
            yield Difference("file", name, f"SHA-256 {left[:16]}…", f"SHA-256 {right[:16]}…")


def _is_side_file(name: str) -> bool:
    return not name.startswith(".") and not name.endswith(".safetensors") and name not in (CONFIG, TWIN, INDEX)
