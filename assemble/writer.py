"""Writes shards: into `NAME.tmp`, in any order of tensors, and under its name only when it is whole and on the disk."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from assemble.checkpoint import INDEX, TensorInfo
from assemble.formats import TensorSpec
from assemble.jsonfile import write_object
from assemble.plan import AssemblyPlan, PlannedShard

CHUNK = 16 * 1024 * 1024
HASHED_AT_ONCE = 64 * 1024 * 1024
Progress = Callable[[int], None]
Look = Callable[[TensorInfo, bytes], None]


class ShardWriter:
    """Writes one shard whose tensors are known beforehand. Use as a context manager: leaving it without an error commits.

    Args:
        path: The shard's final path.
        tensors: Its tensors, in file order.
        hash_apart: Leave the hashing to `hash_written`, for a thread of its own: SHA-256 can be slower than the disk.
    """

    def __init__(self, path: Path, tensors: Iterable[TensorSpec], *, hash_apart: bool = False) -> None:
        self.path = path
        self._temporary = path.with_name(path.name + ".tmp")
        header, self._places = _header(tensors)
        self._missing = set(self._places)
        self._fresh: list[tuple[int, int]] = []  # start and size of what was written since the last `start_writeback`
        self._digest, self._digested, self._hash_apart = hashlib.sha256(header), len(header), hash_apart
        self._front = len(header)  # up to here the file is written without a gap
        self._file = self._temporary.open("w+b", buffering=0)
        try:
            _write_all(self._file.fileno(), header, 0)
        except BaseException:
            self.abandon()
            raise

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None:
                self.commit()
        finally:
            self.abandon()

    @property
    def complete(self) -> bool:
        """Whether every tensor was written."""
        return not self._missing

    def write(self, name: str, data: bytes | memoryview, offset: int = 0) -> None:
        """Writes tensor `name`'s bytes from `offset` on. The last piece of a tensor completes it.

        Raises:
            ValueError: unknown or already written tensor, or bytes outside its place.
        """
        start, nbytes = self._places[name]
        size = memoryview(data).nbytes
        if name not in self._missing or offset + size > nbytes:
            raise ValueError(f"{self.path.name}: {size} bytes at {offset} do not fit {name} ({nbytes} bytes, written once)")
        _write_all(self._file.fileno(), data, start + offset)
        self._fresh.append((start + offset, size))
        if start + offset == self._front:
            if not self._hash_apart:
                self._digest.update(data)
                self._digested += size
            self._front += size
        if offset + size == nbytes:
            self._missing.discard(name)

    def hash_written(self) -> None:
        """Hashes what has been written without a gap since the last time. One thread at a time."""
        while data := os.pread(self._file.fileno(), min(CHUNK, self._front - self._digested), self._digested):
            self._digest.update(data)
            self._digested += len(data)

    def start_writeback(self) -> None:
        """Asks the system to begin writing to the disk what it has, so that `commit` has little left to wait for."""
        if hasattr(os, "posix_fadvise"):
            for start, nbytes in self._fresh:
                # On Linux this starts the writing of dirty pages, and drops only clean ones (mm/fadvise.c, generic_fadvise).
                os.posix_fadvise(self._file.fileno(), start, nbytes, os.POSIX_FADV_DONTNEED)
        self._fresh.clear()

    def sha256(self) -> str:
        """The SHA-256 of the committed file, in hexadecimal; what was not written from front to back is read again."""
        digest = self._digest.copy()
        with self.path.open("rb", buffering=0) as file:
            file.seek(self._digested)
            while chunk := file.read(CHUNK):
                digest.update(chunk)
        return digest.hexdigest()

    def commit(self) -> None:
        """Puts the whole file on the disk, under its name.

        Raises:
            ValueError: a tensor was never written.
        """
        if self._missing:
            raise ValueError(f"{self.path.name}: {len(self._missing)} tensors never written, {min(self._missing)} among them")
        os.fsync(self._file.fileno())
        self._temporary.replace(self.path)
        sync_directory(self.path.parent)

    def abandon(self) -> None:
        """Closes the file; removes it unless it was committed."""
        self._file.close()
        self._temporary.unlink(missing_ok=True)


def _header(tensors: Iterable[TensorSpec]) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """The file's header (padded with spaces to a multiple of 8 bytes), and each tensor's absolute start and size."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets, end = {}, 0
    for tensor in tensors:
        offsets[tensor.name] = (end, tensor.nbytes)
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [end, end + tensor.nbytes],
        }
        end += tensor.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    base = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {n: (base + start, size) for n, (start, size) in offsets.items()}


def _write_all(descriptor: int, data: bytes | memoryview, position: int) -> None:
    view = memoryview(data).cast("B")
    while view:
        written = os.pwrite(descriptor, view, position)
        view, position = view[written:], position + written


def link_file(existing: Path, new: Path) -> None:
    """A hard link (to what a symbolic link leads to), so that no byte is written twice; a copy where there are none."""
    try:
        os.link(existing.resolve(), new)
    except OSError:
        shutil.copyfile(existing, new)


def sync_directory(directory: Path) -> None:
    """Makes the directory's entries (a rename, say) survive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_file(path: Path, progress: Progress = lambda _: None) -> str:
    """The SHA-256 of a file, in hexadecimal. `progress` is called with the bytes of each chunk."""
    # One buffer, and large pieces: hashing holds no lock of the interpreter, and several files are hashed beside other work.
    digest, buffer = hashlib.sha256(), bytearray(min(HASHED_AT_ONCE, max(1, path.stat().st_size)))
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while nbytes := file.readinto(buffer):
            digest.update(view[:nbytes])
            progress(nbytes)
    return digest.hexdigest()


def sha256_tensor(path: Path, tensor: TensorInfo) -> str:
    """The SHA-256 of one tensor's bytes, in hexadecimal."""
    digest = hashlib.sha256()
    for chunk in read_chunks(path, tensor):
        digest.update(chunk)
    return digest.hexdigest()


def read_chunks(path: Path, tensor: TensorInfo) -> Iterable[bytes]:
    """A tensor's bytes, a chunk at a time.

    Raises:
        OSError: the file ends before the tensor does.
    """
    left = tensor.nbytes
    with path.open("rb", buffering=0) as file:
        file.seek(tensor.start)
        while left:
            chunk = file.read(min(CHUNK, left))
            if not chunk:
                raise OSError(f"{path} ends inside tensor {tensor.name}")
            left -= len(chunk)
            yield chunk


def copy_shard(plan: AssemblyPlan, shard: PlannedShard, directory: Path, look: Look = lambda *_: None) -> str:
    """Writes a shard of copied tensors, byte for byte from where the plan says they lie.

    Args:
        plan: The plan.
        shard: One of its shards.
        directory: Where it goes.
        look: Called with each piece of a tensor before it is written; what it raises stops the copying.

    Returns:
        The SHA-256 of the file, in hexadecimal.
    """
    with ShardWriter(directory / shard.name, shard.tensors) as writer:
        for spec in shard.tensors:
            tensor = plan.copies[spec.name]
            if not tensor.nbytes:
                writer.write(spec.name, b"")
            offset = 0
            for chunk in read_chunks(plan.checkpoint_of(spec.name).path_of(tensor), tensor):
                look(tensor, chunk)
                writer.write(spec.name, chunk, offset)
                offset += len(chunk)
            writer.start_writeback()
    return writer.sha256()


def write_index(plan: AssemblyPlan, directory: Path) -> None:
    """Writes `model.safetensors.index.json`: the last file of the weights, since it declares them complete."""
    write_object(directory / INDEX, {"metadata": {"total_size": plan.nbytes}, "weight_map": plan.weight_map})
