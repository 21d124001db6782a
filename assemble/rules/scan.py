"""One pass over the bytes of a checkpoint, from which every rule about values is answered.

The files are read in pieces of 16 MiB, several at once, each by a thread that reads it and looks at it; what they saw is put
together in the order of the files. Memory is a piece a thread, whatever the checkpoint's size. Where a tensor's origin is
known (the source's, for an unquantized one), the origin's bytes are read beside it and compared. Nothing is cast: BF16 and
E4M3 are looked at as integers.
"""

import ctypes
import errno
import hashlib
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from assemble.checkpoint import DTYPE_BYTES, TensorInfo

PIECE = 16 * 1024 * 1024
BLOCK = 1024 * 1024  # compared in one go, so that it is still in the cache
THREADS = min(8, max(2, os.cpu_count() or 1))
NEAR = 128 * 1024  # rows that lie within so many bytes are read in one go
LARGE = 64 * 1024  # bytes from which a tensor's content is sampled, to find equal tensors
Bytes = npt.NDArray[np.uint8]
_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
# As integers, infinities and NaNs (NaNs alone for E4M3, which has no infinity) are the largest of the positive numbers, from
# this one on; with the sign's bit, as unsigned integers, they are the largest of all.
_SPECIAL: dict[str, tuple[Any, Any, int]] = {
    "BF16": (np.int16, np.uint16, 0x7F80),
    "F16": (np.int16, np.uint16, 0x7C00),
    "F32": (np.int32, np.uint32, 0x7F800000),
    "F8_E4M3": (np.int8, np.uint8, 0x7F),
}


@dataclass(slots=True)
class Facts:
    """What the bytes of one tensor say.

    Attributes:
        zero: Every byte is zero.
        special: Some element is NaN or infinite.
        zero_codes: Zero bytes of a `weight_scale` in E4M3: blocks whose scale is 0.
        high_codes: Its bytes from 0x7f on: NaN or negative.
        value: The value of an F32 scalar.
        sample: A digest of a few places of a large tensor; equal tensors have equal ones.
        differs_at: Byte at which it first differs from its origin; None when it does not or has none.
    """

    zero: bool = True
    special: bool = False
    zero_codes: int = 0
    high_codes: int = 0
    value: float | None = None
    sample: Any = field(default=None, repr=False)
    differs_at: int | None = None

    def add(self, later: "Facts") -> None:
        """Takes in what the bytes after those looked at so far say."""
        self.zero &= later.zero
        self.special |= later.special
        self.zero_codes += later.zero_codes
        self.high_codes += later.high_codes
        self.value = later.value
        if self.sample is None:
            self.sample = later.sample
        else:
            self.sample.update(later.sample.digest())
        if self.differs_at is None:
            self.differs_at = later.differs_at


@dataclass(frozen=True, slots=True)
class _Part:
    """Bytes of one tensor in a piece: `offset` inside the tensor, `start` inside the piece."""

    tensor: TensorInfo
    offset: int
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Piece:
    """Neighbouring bytes of a shard that are read in one go, from `start` on."""

    shard: str
    start: int
    parts: list[_Part]

    @property
    def nbytes(self) -> int:
        return self.parts[-1].start + self.parts[-1].nbytes


def scan(
    root: Path,
    tensors: list[TensorInfo],
    origins: Mapping[str, tuple[Path, TensorInfo]],
    progress: Callable[[int], None] = lambda _: None,
) -> dict[str, Facts]:
    """Reads the tensors' bytes.

    Args:
        root: The checkpoint's directory.
        tensors: What to read.
        origins: Name -> the directory and place of the tensor that it should equal (of the same size).
        progress: Called with the bytes read, origins not counted.

    Raises:
        OSError: a file that cannot be read, or ends too early.
    """
    facts: dict[str, Facts] = {}
    with Files() as files, ThreadPoolExecutor(THREADS) as pool:
        local = threading.local()

        def look(piece: _Piece) -> list[Facts]:
            if not hasattr(local, "buffer"):
                local.buffer = np.empty(PIECE, np.uint8)
            data = files.read(root, piece.shard, piece.start, local.buffer[: piece.nbytes])
            return [_look(part, data[part.start : part.start + part.nbytes], files, origins) for part in piece.parts]

        pieces = list(_pieces(tensors))
        for piece, seen in zip(pieces, pool.map(look, pieces), strict=True):
            for part, new in zip(piece.parts, seen, strict=True):
                if part.offset:
                    facts[part.tensor.name].add(new)
                else:
                    facts[part.tensor.name] = new
            progress(sum(part.nbytes for part in piece.parts))
    return {tensor.name: facts.get(tensor.name) or Facts() for tensor in tensors}


class Files:
    """Open files by folder and name, so that the 93,627 tensors of a large checkpoint do not open theirs one by one."""

    def __init__(self) -> None:
        self._open: dict[tuple[Path, str], int] = {}
        self._opening = threading.Lock()

    def __enter__(self) -> "Files":
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)

    def read(self, root: Path, shard: str, start: int, buffer: Bytes) -> Bytes:
        """Fills the buffer from the file and returns it."""
        descriptor, done = self._descriptor(root, shard), 0
        while done < buffer.size:
            count = os.preadv(descriptor, [buffer[done:].data], start + done)
            if not count:
                raise OSError(errno.EIO, "it ends too early", str(root / shard))
            done += count
        return buffer

    def rows(self, root: Path, tensor: TensorInfo, rows: list[int]) -> Bytes:
        """The bytes [rows, bytes of one] of some rows of a tensor, ascending; in a stack of matrices, counted through all."""
        width = tensor.nbytes // max(1, math.prod(tensor.shape[:-1]))
        if not rows or not width:
            return np.empty((len(rows), width), np.uint8)
        start, span = tensor.start + rows[0] * width, (rows[-1] + 1 - rows[0]) * width
        if span <= NEAR:
            near = self.read(root, tensor.shard, start, np.empty(span, np.uint8)).reshape(-1, width)
            return near.take(np.array(rows) - rows[0], axis=0)
        descriptor, found = self._descriptor(root, tensor.shard), np.empty((len(rows), width), np.uint8)
        for row, place in zip(rows, found, strict=True):
            if os.preadv(descriptor, [place.data], tensor.start + row * width) != width:
                self.read(root, tensor.shard, tensor.start + row * width, place)
        return found

    def _descriptor(self, root: Path, shard: str) -> int:
        descriptor = self._open.get((root, shard))
        if descriptor is None:
            with self._opening:
                if (root, shard) not in self._open:
                    self._open[root, shard] = os.open(root / shard, os.O_RDONLY)
                descriptor = self._open[root, shard]
        return descriptor


def _pieces(tensors: list[TensorInfo]) -> Iterator[_Piece]:
    """Cuts neighbouring tensors into pieces of about `PIECE` bytes; a cut inside a tensor is a multiple of `PIECE` in it."""
    shard, start, end, parts = "", 0, 0, list[_Part]()
    for tensor in sorted(tensors, key=lambda t: (t.shard, t.start)):
        for offset in range(0, tensor.nbytes, PIECE):
            nbytes, place = min(PIECE, tensor.nbytes - offset), tensor.start + offset
            if parts and (tensor.shard != shard or place != end or end + nbytes - start > PIECE):
                yield _Piece(shard, start, parts)
                parts = []
            if not parts:
                shard, start = tensor.shard, place
            parts.append(_Part(tensor, offset, place - start, nbytes))
            end = place + nbytes
    if parts:
        yield _Piece(shard, start, parts)


def _look(part: _Part, view: Bytes, files: Files, origins: Mapping[str, tuple[Path, TensorInfo]]) -> Facts:
    """What these bytes of a tensor say by themselves."""
    facts, tensor = Facts(zero=not (view[:4096].any() or view.any())), part.tensor
    if tensor.dtype == "F32" and tensor.nbytes == 4:
        facts.value = float(view.view("<f4")[0])
    if tensor.dtype == "F8_E4M3" and tensor.name.endswith(".weight_scale"):
        facts.zero_codes = view.size - int(np.count_nonzero(view))
        if int(view.max()) >= 0x7F:
            facts.high_codes = int(np.count_nonzero(view >= 0x7F))
    elif tensor.dtype in _SPECIAL:
        facts.special = _has_special(view, tensor.dtype)
    if tensor.nbytes >= LARGE:
        facts.sample = hashlib.blake2b(repr((tensor.dtype, tensor.shape)).encode(), digest_size=16)
        facts.sample.update(view[:1024].tobytes())
        facts.sample.update(view[: view.size // 64 * 64].reshape(-1, 64)[::1024].tobytes())
    if origin := origins.get(tensor.name):
        facts.differs_at = _difference(part, view, files, origin)
    return facts


def holds_special(data: bytes, dtype: str) -> bool:
    """Whether some element of a tensor's bytes is NaN or infinite; False for a dtype that has neither."""
    return dtype in _SPECIAL and len(data) > 0 and _has_special(np.frombuffer(data, np.uint8), dtype)


def _has_special(view: Bytes, dtype: str) -> bool:
    signed, unsigned, least = _SPECIAL[dtype]
    values = view[: view.size // DTYPE_BYTES[dtype] * DTYPE_BYTES[dtype]]
    if not values.size:
        return False
    sign = np.iinfo(signed).max + 1
    return int(values.view(signed).max()) >= least or int(values.view(unsigned).max()) >= sign + least


def _difference(part: _Part, view: Bytes, files: Files, origin: tuple[Path, TensorInfo]) -> int | None:
    """The byte of the tensor at which it first differs from its origin, in this part of it."""
    root, theirs = origin
    buffer = np.empty(min(BLOCK, part.nbytes), np.uint8)
    for i in range(0, part.nbytes, BLOCK):
        mine = view[i : i + BLOCK]
        its = files.read(root, theirs.shard, theirs.start + part.offset + i, buffer[: mine.size])
        if not _equal(mine, its):
            return part.offset + i + int(np.flatnonzero(mine != its)[0])
    return None


def same_bytes(root: Path, first: TensorInfo, second: TensorInfo) -> bool:
    """Whether two tensors of equal size have equal bytes."""
    with Files() as files:
        for offset in range(0, first.nbytes, PIECE):
            count = min(PIECE, first.nbytes - offset)
            one, other = np.empty(count, np.uint8), np.empty(count, np.uint8)
            files.read(root, first.shard, first.start + offset, one)
            if not _equal(one, files.read(root, second.shard, second.start + offset, other)):
                return False
    return True


def _equal(one: Bytes, other: Bytes) -> bool:
    """Whether as many bytes are the same. NumPy's `array_equal` takes twice as long: it writes down every byte's answer."""
    return not _memcmp(one.ctypes.data, other.ctypes.data, one.size)
