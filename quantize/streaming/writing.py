"""Packed tensors on their way to the shards: from the device to the host to the disk, while the next are computed.

The shards are those of the plan. A shard is committed (on the disk, under its name) and hashed as soon as its last tensor
is there; its digest then says that it is finished. Tensors whose shard is not among the wanted ones are refused: it was
finished before, or another process writes it.
"""

import contextlib
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from assemble.formats import TensorSpec
from assemble.plan import PlannedShard
from assemble.writer import ShardWriter
from quantize.errors import CheckFailedError

QUEUED_BYTES = 256_000_000  # packed bytes that may wait for the disk
PIECE = 32 * 1024 * 1024
DTYPES = {"U8": torch.uint8, "F8_E4M3": torch.float8_e4m3fn, "F32": torch.float32}


class CoverageError(CheckFailedError):
    """What was quantized is not what was planned. A fault of this program or of versions, not of the input."""


class ShardSink:
    """Writes tensors to shards from a thread of its own. Use as a context manager.

    Args:
        shards: The shards to write.
        directory: Where.
        finished: Called with a shard's name and SHA-256 once it is on the disk, from another thread.
    """

    def __init__(self, shards: Iterable[PlannedShard], directory: Path, finished: Callable[[str, str], None]) -> None:
        self._home = {t.name: shard for shard in shards for t in shard.tensors}
        self._specs = {t.name: t for shard in shards for t in shard.tensors}
        self._directory, self._finished = directory, finished
        self._writers: dict[str, ShardWriter] = {}
        self._disk, self._hashing, self._commits = ThreadPoolExecutor(1), ThreadPoolExecutor(1), ThreadPoolExecutor(2)
        self._waiting: list[Future[Any]] = []
        self._room = _Room(QUEUED_BYTES)
        self._staging: Tensor | None = None
        self._stream: Any = None

    def __enter__(self) -> "ShardSink":
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the threads; removes what was not committed."""
        self._room.open()
        self._disk.shutdown(cancel_futures=True)
        self._commits.shutdown(cancel_futures=True)
        self._hashing.shutdown(cancel_futures=True)
        for writer in self._writers.values():
            writer.abandon()

    def wants(self, name: str) -> bool:
        """Whether a tensor belongs to one of the shards."""
        return name in self._home

    def write(self, tensors: Mapping[str, Tensor], ready: Any = None) -> None:
        """Queues tensors, on any device; waits while too much is queued.

        Args:
            tensors: By name.
            ready: The CUDA event after which they are what they shall be; of now, when none is given.

        Raises:
            CoverageError: a tensor that the plan does not have, or another dtype or shape than planned.
        """
        for name, tensor in tensors.items():
            spec = self._specs.get(name)
            if spec is None or (tensor.dtype, tuple(tensor.shape)) != (DTYPES[spec.dtype], spec.shape):
                planned = f"{spec.dtype} {spec.shape}" if spec else "nothing"
                raise CoverageError(f"{name} became {tensor.dtype} {tuple(tensor.shape)}, planned {planned}")
        self.check()
        nbytes = sum(self._specs[name].nbytes for name in tensors)
        self._room.take(nbytes)
        device = next((t.device for t in tensors.values() if t.is_cuda), None)
        if device and ready is None:
            ready = torch.cuda.current_stream(device).record_event()
        self._waiting.append(self._disk.submit(self._write, dict(tensors), nbytes, device, ready))

    def check(self) -> None:
        """Raises what a thread met, a full disk, say."""
        for done in [w for w in self._waiting if w.done()]:
            done.result()
            self._waiting.remove(done)

    def finish(self) -> None:
        """Waits until everything is on the disk.

        Raises:
            CoverageError: a shard did not become whole.
        """
        self._disk.shutdown()
        for waiting in self._waiting:
            waiting.result()
        self._commits.shutdown()
        for waiting in self._waiting:
            waiting.result()
        missing = {shard.name for shard in self._home.values()} - self._writers.keys()
        unfinished = sorted(missing | {name for name, writer in self._writers.items() if not writer.complete})
        if unfinished:
            raise CoverageError(f"not every planned module was quantized: {unfinished[0]} is incomplete")

    def _write(self, tensors: dict[str, Tensor], nbytes: int, device: torch.device | None, ready: Any) -> None:
        try:
            with self._beside(device, ready):
                for name, tensor in tensors.items():
                    self._put(self._writer(self._home[name]), self._specs[name], tensor)
        finally:
            self._room.give(nbytes)
        for shard in {self._home[name].name for name in tensors}:
            self._waiting.append(self._hashing.submit(self._writers[shard].hash_written))
            if self._writers[shard].complete:
                self._waiting.append(self._commits.submit(self._commit, shard))

    def _beside(self, device: torch.device | None, ready: Any) -> contextlib.AbstractContextManager[Any]:
        """On a GPU, a stream of its own: copies wait for their tensors, and not for all that was queued after them.

        A thread starts with GPU 0 as its current one, whichever the process works on, so nothing may depend on that.
        """
        if device is None:
            return contextlib.nullcontext()
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_event(ready)
        return torch.cuda.stream(self._stream)

    def _writer(self, shard: PlannedShard) -> ShardWriter:
        if shard.name not in self._writers:
            self._writers[shard.name] = ShardWriter(self._directory / shard.name, shard.tensors, hash_apart=True)
        return self._writers[shard.name]

    def _put(self, writer: ShardWriter, spec: TensorSpec, tensor: Tensor) -> None:
        flat = tensor.contiguous().reshape(-1).view(torch.uint8)
        for offset in range(0, spec.nbytes, PIECE):
            piece = flat[offset : offset + PIECE]
            writer.write(spec.name, self._on_host(piece).numpy().data, offset)
        writer.start_writeback()

    def _on_host(self, piece: Tensor) -> Tensor:
        if not piece.is_cuda:
            return piece
        if self._staging is None:
            self._staging = torch.empty(PIECE, dtype=torch.uint8, pin_memory=True)
        host = self._staging[: piece.numel()]
        host.copy_(piece, non_blocking=True)
        self._stream.synchronize()
        return host

    def _commit(self, shard: str) -> None:
        writer = self._writers[shard]
        writer.commit()
        self._finished(shard, self._hashing.submit(writer.sha256).result())
        writer.abandon()


class _Room:
    """Bytes that may be under way at once. One that is larger than the room goes alone."""

    def __init__(self, nbytes: int) -> None:
        self._limit, self._taken, self._changed = nbytes, 0, threading.Condition()

    def take(self, nbytes: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._taken or self._taken + nbytes <= self._limit)
            self._taken += nbytes

    def give(self, nbytes: int) -> None:
        with self._changed:
            self._taken -= nbytes
            self._changed.notify_all()

    def open(self) -> None:
        """Lets everyone through."""
        with self._changed:
            self._limit = 1 << 62
            self._changed.notify_all()
