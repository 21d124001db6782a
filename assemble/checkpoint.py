"""Reads what a safetensors checkpoint holds, from headers alone.

A safetensors file is: 8 bytes, the header's length N as a little-endian integer; N bytes of JSON (`assemble.header`); then
tensor data. The data of all tensors covers the rest of the file without holes or overlaps.

A checkpoint of several files has `model.safetensors.index.json`, whose `weight_map` names the file of each tensor.
vLLM and transformers use it to pick *files*; vLLM then reads every tensor of each file it picked.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

from assemble.header import DTYPE_BYTES, CheckpointError, TensorInfo, read_header
from assemble.jsonfile import JSONFileError, read_object

__all__ = [
    "DTYPE_BYTES", "HEADER_LIMIT", "INDEX", "JSON_LIMIT", "LINK_OUT", "Checkpoint", "CheckpointError", "Layout", "Problem",
    "Shard", "TensorInfo", "read_json", "read_layout", "read_shard", "stays_inside",
]  # fmt: skip

INDEX = "model.safetensors.index.json"
HEADER_LIMIT = 100_000_000  # bytes; the limit of the safetensors library itself (safetensors 0.8, MAX_HEADER_SIZE)
JSON_LIMIT = 100_000_000  # bytes of a JSON file beside the weights; a real index of 93,627 tensors has 9 MB


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong with the files: `kind` is one of the rule ids of `assemble.rules.files`."""

    kind: str
    where: str
    text: str


@dataclass(frozen=True)
class Shard:
    """One safetensors file: its tensors in file order and its `__metadata__`."""

    name: str
    file_bytes: int
    tensors: tuple[TensorInfo, ...]
    metadata: Mapping[str, str]


@dataclass(frozen=True)
class Layout:
    """Everything the headers and the index say, and every way in which they disagree."""

    root: Path
    shards: tuple[Shard, ...]
    index: Mapping[str, Any] | None
    problems: tuple[Problem, ...]


@dataclass(frozen=True)
class Checkpoint(Mapping[str, TensorInfo]):
    """A sound checkpoint: a read-only mapping of tensor name to `TensorInfo`, and the raw config.json."""

    root: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    shards: tuple[Shard, ...] = field(repr=False)

    @classmethod
    def open(cls, root: Path) -> "Checkpoint":
        """Reads the headers of a local checkpoint.

        Raises:
            CheckpointError: no such directory, no config.json, no weights, or files that do not hold together.
        """
        if not root.exists():
            raise CheckpointError(f"{root} does not exist. Give a checkpoint's directory, or a Hub id such as org/name.")
        if not root.is_dir():
            raise CheckpointError(f"{root} is a file. Give the directory that holds config.json and the shards.")
        if not (root / "config.json").is_file():
            raise CheckpointError(f"{root} has no config.json, so it is not a checkpoint's directory.")
        config = read_json(root, "config.json") or {}
        layout = read_layout(root)
        if layout.problems:
            first, *others = layout.problems
            more = f" ({len(others)} more such problems)" if others else ""
            raise CheckpointError(f"{root}: {first.where}: {first.text}{more}. Download or copy the checkpoint again.")
        return cls(root, config, {t.name: t for s in layout.shards for t in s.tensors}, layout.shards)

    def __getitem__(self, name: str) -> TensorInfo:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def path_of(self, tensor: TensorInfo) -> Path:
        """The file that holds the tensor."""
        return self.root / tensor.shard

    def read(self, name: str) -> bytes:
        """The tensor's bytes, as stored (little-endian, row-major)."""
        tensor = self.tensors[name]
        with self.path_of(tensor).open("rb") as file:
            file.seek(tensor.start)
            return file.read(tensor.nbytes)


LINK_OUT = "a symbolic link that leads out of the folder: not followed"


def stays_inside(path: Path) -> bool:
    """Whether opening `path` reads a file of its own folder, or a blob of a Hugging Face cache.

    A downloaded snapshot is a folder of symbolic links, `snapshots/REVISION/NAME -> ../../blobs/HASH` under
    `models--ORG--NAME/`, and older clients linked a `local_dir` there as well (huggingface_hub 1.33 file_download.py
    `_create_symlink`). Any other link that leads out of the folder could have come with an archive: it is not followed.
    """
    if not path.is_symlink():
        return True
    target = path.resolve()
    blob = target.parent.name == "blobs" and target.parent.parent.name.startswith(("models--", "datasets--"))
    return blob or target.is_relative_to(path.parent.resolve())


def read_json(root: Path, name: str) -> dict[str, Any] | None:
    """The JSON object in `root / name`, or None where there is no such file.

    Raises:
        JSONFileError: not a JSON object, larger than `JSON_LIMIT`, or a symbolic link out of the folder.
    """
    path = root / name
    if not path.is_file():
        return None
    if not stays_inside(path):
        raise JSONFileError(f"{path} is {LINK_OUT}. Put the file itself there, or give the folder that it leads to.")
    if path.stat().st_size > JSON_LIMIT:
        raise JSONFileError(f"{name} has {path.stat().st_size} bytes; a checkpoint's JSON files have {JSON_LIMIT} at most")
    return read_object(path)


def read_layout(root: Path) -> Layout:
    """Reads index and headers of every shard in `root`, collecting problems instead of stopping at the first.

    Follows vLLM's choice of files: those that the index names, or all `*.safetensors` of the folder when there is no index
    (vLLM 0.33 model_loader/weight_utils.py:590 `filter_duplicate_safetensors_files`).
    """
    problems: list[Problem] = []
    files = sorted(p.name for p in root.glob("*.safetensors") if p.is_file())
    on_disk = [name for name in files if stays_inside(root / name)]
    linked_out = sorted(set(files) - set(on_disk))
    problems += [Problem("IDX-1", name, LINK_OUT) for name in linked_out]
    index = _read_index(root, problems)
    named = _files_of(index, problems) if index is not None else set(on_disk)
    if index is None and len(on_disk) > 1:
        problems.append(Problem("IDX-1", INDEX, f"absent, though there are {len(on_disk)} safetensors files"))
    if not on_disk and not named:
        problems.append(Problem("IDX-1", "*.safetensors", "no weights here"))
    absent, unread = sorted(named - set(files)), sorted(set(on_disk) - named)
    problems += [Problem("IDX-1", name, "named in the index, but the file is not there") for name in absent]
    problems += [Problem("IDX-1", name, "on disk, but not in the index: it would not be read") for name in unread]
    shards = []
    for name in sorted(named & set(on_disk)):
        try:
            shards.append(read_shard(root / name))
        except (CheckpointError, JSONFileError) as error:
            problems.append(Problem("IDX-4", name, str(error)))
        except OSError as error:
            problems.append(Problem("IDX-4", name, f"cannot be read: {error.strerror}"))
    if not _agree(index, shards):
        problems += _compare(index, shards)
    return Layout(root, tuple(shards), index, tuple(problems))


def read_shard(path: Path) -> Shard:
    """Reads one file's header and checks it against the file.

    Raises:
        CheckpointError: truncated, overlong, a hole, an overlap, a dtype or shape that does not fit its bytes.
        JSONFileError: the header is not a JSON object.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > min(HEADER_LIMIT, size - 8):
            raise CheckpointError(f"not a safetensors file, or cut off inside its header ({size} bytes)")
        header = file.read(length)
    base = 8 + length
    tensors, metadata = read_header(header, path.name, base)
    if _misplaced(tensors, base):
        tensors.sort(key=attrgetter("start", "nbytes"))
    if found := _misplaced(tensors, base):
        raise CheckpointError(f"tensor {found[0].name} starts at byte {found[0].start}, expected {found[1]}")
    end = base + sum(tensor.nbytes for tensor in tensors)
    if end != size:
        what = "cut off" if size < end else "longer than its header says"
        raise CheckpointError(f"{what}: {size} bytes on disk, {end} expected")
    return Shard(path.name, size, tuple(tensors), metadata)


def _misplaced(tensors: list[TensorInfo], start: int) -> tuple[TensorInfo, int] | None:
    """The first tensor that does not begin where the one before it ends, and where that is."""
    end = start
    for tensor in tensors:
        if tensor.start != end:
            return tensor, end
        end += tensor.nbytes
    return None


def _read_index(root: Path, problems: list[Problem]) -> dict[str, Any] | None:
    try:
        return read_json(root, INDEX)
    except JSONFileError as error:
        problems.append(Problem("IDX-2", INDEX, str(error)))
        return {}


def _files_of(index: Mapping[str, Any], problems: list[Problem]) -> set[str]:
    """The files that the index names; a name that would lead out of the folder is a problem, never followed."""
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
        problems.append(Problem("IDX-2", INDEX, "weight_map must map tensor names to file names"))
        return set()
    files = set(weight_map.values())
    unsafe = {f for f in files if Path(f).name != f or not f.endswith(".safetensors") or "\\" in f}
    problems += [Problem("IDX-2", INDEX, f"{f!r} is not the name of a safetensors file in this folder") for f in unsafe]
    return files - unsafe


def _compare(index: Mapping[str, Any] | None, shards: list[Shard]) -> Iterator[Problem]:
    """Where tensors are stored twice, or elsewhere than the index says."""
    homes: dict[str, list[str]] = {}
    for shard in shards:
        for tensor in shard.tensors:
            homes.setdefault(tensor.name, []).append(shard.name)
    for name, files in homes.items():
        if len(files) > 1:
            yield Problem("IDX-2", name, f"stored twice, in {files[0]} and {files[1]}: readers keep one of the two")
    weight_map = index.get("weight_map") if index else None
    if not isinstance(weight_map, dict):
        return
    read = {shard.name for shard in shards}
    for name, file in weight_map.items():
        if file in read and file not in homes.get(name, []):
            yield Problem("IDX-2", name, f"the index places it in {file}, where it is not")
    for name, files in homes.items():
        if name not in weight_map:
            yield Problem("IDX-2", name, f"in {files[0]}, but not in the index")


def _agree(index: Mapping[str, Any] | None, shards: list[Shard]) -> bool:
    """Whether each tensor is stored once, and where the index, if there is one, says: nearly always, and quickly seen."""
    home: dict[str, str] = {}
    for shard in shards:
        home |= dict.fromkeys((tensor.name for tensor in shard.tensors), shard.name)
    return len(home) == sum(len(shard.tensors) for shard in shards) and (index is None or index.get("weight_map") == home)
