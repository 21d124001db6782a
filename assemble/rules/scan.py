"""One pass over the bytes of a checkpoint, from which every rule about values is answered.

The files are read from front to back in pieces of 16 MiB, the next piece while the last one is looked at. Memory is a few
such pieces, whatever the checkpoint's size. Where a tensor's origin is known (the source's, for an unquantized one), the
origin's bytes are read beside it and compared. Nothing is cast: BF16 and E4M3 are looked at as integers.
"""

import errno
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from assemble.checkpoint import DTYPE_BYTES, TensorInfo

PIECE = 16 * 1024 * 1024
BLOCK = 1024 * 1024  # looked at in one go, so that intermediate results stay in the cache
LARGE = 64 * 1024  # bytes from which a tensor's content is sampled, to find equal tensors
Bytes = npt.NDArray[np.uint8]
# The bits that are all ones in an infinity or a NaN (in a NaN, for E4M3, which has no infinity).
_SPECIAL: dict[str, tuple[Any, int]] = {
    "BF16": (np.uint16, 0x7F80),
    "F16": (np.uint16, 0x7C00),
    "F32": (np.uint32, 0x7F800000),
    "F8_E4M3": (np.uint8, 0x7F),
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


@dataclass(frozen=True, slots=True)
class _Part:
    """Bytes of one tensor in a piece: `offset` inside the tensor, `start` inside the piece."""

    tensor: TensorInfo
    offset: int
    start: int
    nbytes: int


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
        origins: Name -> the file and place of the tensor that it should equal (of the same size).
        progress: Called with the bytes read, origins not counted.

    Raises:
        OSError: a file that cannot be read, or ends too early.
    """
    facts = {tensor.name: Facts() for tensor in tensors}
    with _Files() as files, ThreadPoolExecutor(1) as reader:
        for piece, parts in _read(root, tensors, files, reader):
            for part in parts:
                view = piece[part.start : part.start + part.nbytes]
                _look(facts[part.tensor.name], part, view)
                if origin := origins.get(part.tensor.name):
                    _compare(facts[part.tensor.name], part, view, files, origin)
            progress(sum(part.nbytes for part in parts))
    return facts


class _Files:
    """Open files by path, so that the 93,627 tensors of a large checkpoint do not open theirs one by one."""

    def __init__(self) -> None:
        self._open: dict[Path, int] = {}

    def __enter__(self) -> "_Files":
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)

    def read(self, path: Path, start: int, buffer: Bytes) -> Bytes:
        """Fills the buffer from the file and returns it."""
        if path not in self._open:
            self._open[path] = os.open(path, os.O_RDONLY)
        done = 0
        while done < buffer.size:
            count = os.preadv(self._open[path], [buffer[done:].data], start + done)
            if not count:
                raise OSError(errno.EIO, "it ends too early", str(path))
            done += count
        return buffer


def _read(
    root: Path, tensors: list[TensorInfo], files: _Files, reader: ThreadPoolExecutor
) -> Iterator[tuple[Bytes, list[_Part]]]:
    """Pieces and what lies in them; one piece is read ahead, so two buffers take turns."""
    buffers = np.empty(PIECE, np.uint8), np.empty(PIECE, np.uint8)
    pending: tuple[Future[Bytes], list[_Part]] | None = None
    for turn, (shard, start, parts) in enumerate(_pieces(tensors)):
        nbytes = parts[-1].start + parts[-1].nbytes
        ahead = reader.submit(files.read, root / shard, start, buffers[turn % 2][:nbytes])
        if pending:
            yield pending[0].result(), pending[1]
        pending = ahead, parts
    if pending:
        yield pending[0].result(), pending[1]


def _pieces(tensors: list[TensorInfo]) -> Iterator[tuple[str, int, list[_Part]]]:
    """Cuts neighbouring tensors into pieces of about `PIECE` bytes; a cut inside a tensor is a multiple of `PIECE` in it."""
    shard, start, end, parts = "", 0, 0, list[_Part]()
    for tensor in sorted(tensors, key=lambda t: (t.shard, t.start)):
        for offset in range(0, tensor.nbytes, PIECE):
            nbytes, place = min(PIECE, tensor.nbytes - offset), tensor.start + offset
            if parts and (tensor.shard != shard or place != end or end + nbytes - start > PIECE):
                yield shard, start, parts
                parts = []
            if not parts:
                shard, start = tensor.shard, place
            parts.append(_Part(tensor, offset, place - start, nbytes))
            end = place + nbytes
    if parts:
        yield shard, start, parts


def _look(facts: Facts, part: _Part, view: Bytes) -> None:
    tensor = part.tensor
    if facts.zero and (view[:4096].any() or view.any()):
        facts.zero = False
    if tensor.dtype == "F32" and tensor.nbytes == 4:
        facts.value = float(view.view("<f4")[0])
    block_scales = tensor.dtype == "F8_E4M3" and tensor.name.endswith(".weight_scale")
    if block_scales:
        facts.zero_codes += view.size - int(np.count_nonzero(view))
        if int(view.max()) >= 0x7F:
            facts.high_codes += int(np.count_nonzero(view >= 0x7F))
    elif tensor.dtype in _SPECIAL and not facts.special:
        facts.special = _has_special(view, tensor.dtype)
    if tensor.nbytes >= LARGE:
        facts.sample = facts.sample or hashlib.blake2b(repr((tensor.dtype, tensor.shape)).encode(), digest_size=16)
        facts.sample.update(view[:1024].tobytes())
        facts.sample.update(view[: view.size // 64 * 64].reshape(-1, 64)[::1024].tobytes())


def holds_special(data: bytes, dtype: str) -> bool:
    """Whether some element of a tensor's bytes is NaN or infinite; False for a dtype that has neither."""
    return dtype in _SPECIAL and len(data) > 0 and _has_special(np.frombuffer(data, np.uint8), dtype)


def _has_special(view: Bytes, dtype: str) -> bool:
    kind, mask = _SPECIAL[dtype]
    values = view[: view.size // DTYPE_BYTES[dtype] * DTYPE_BYTES[dtype]].view(kind)
    scratch = np.empty(min(values.size, BLOCK), kind)
    for i in range(0, values.size, BLOCK):
        block = values[i : i + BLOCK]
        if int(np.bitwise_and(block, kind(mask), out=scratch[: block.size]).max()) == mask:
            return True
    return False


def _compare(facts: Facts, part: _Part, view: Bytes, files: _Files, origin: tuple[Path, TensorInfo]) -> None:
    if facts.differs_at is not None:
        return
    path, theirs = origin
    buffer = np.empty(min(BLOCK, part.nbytes), np.uint8)
    for i in range(0, part.nbytes, BLOCK):
        mine = view[i : i + BLOCK]
        its = files.read(path, theirs.start + part.offset + i, buffer[: mine.size])
        if not np.array_equal(mine, its):
            facts.differs_at = part.offset + i + int(np.flatnonzero(mine != its)[0])
            return


def same_bytes(root: Path, first: TensorInfo, second: TensorInfo) -> bool:
    """Whether two tensors of equal size have equal bytes."""
    with _Files() as files:
        for offset in range(0, first.nbytes, PIECE):
            count = min(PIECE, first.nbytes - offset)
            one, other = np.empty(count, np.uint8), np.empty(count, np.uint8)
            files.read(root / first.shard, first.start + offset, one)
            if not np.array_equal(one, files.read(root / second.shard, second.start + offset, other)):
                return False
    return True
