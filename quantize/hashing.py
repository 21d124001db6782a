"""Content hashes of a run's inputs. An unchanged file (size and times) keeps its hash.

Shards are hashed with BLAKE3, which is quicker than a disk; everything else with SHA-256. Both are of the whole content.

The first run of a model hashes its shards in the background, beside all it does until they are quantized, and so that they
come from the disk once. Until then the records know a shard by its size and times, which are as good for a run that goes on
where it was; `settle` puts the hash in their place.
"""

import contextlib
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from assemble.errors import InputError
from assemble.jsonfile import read_object, write_object
from assemble.writer import sha256_file
from quantize.console import Reporter
from quantize.fingerprint import fingerprint
from quantize.machine import available_memory_bytes
from quantize.stage import STARTED, Record, read_record

PIECE = 16 * 1024 * 1024  # of a shard
READERS = min(6, os.cpu_count() or 1)  # one thread copies some 3 GB/s out of the page cache, and BLAKE3 hashes faster than that
THREADS_BESIDE = min(2, max(1, (os.cpu_count() or 1) // 4))  # that read, and as many that hash, beside other work
NICE = 10  # the priority of these: other work goes first
Entry = dict[str, Any]  # of a file: its stamp, and the digest; "" when it is not known yet
Advance = Callable[[int], None]


def stamp(path: Path) -> Entry:
    """Which file it is, and what changes when it does, without reading it."""
    status = path.stat()
    # ctime too: a copy that keeps times (cp -p, rsync -t) sets mtime, and nothing but a change of the file sets ctime.
    # The path too: files that are made together can be of one size and one tick of the clock.
    times = {"mtime_ns": status.st_mtime_ns, "ctime_ns": status.st_ctime_ns}
    return {"path": str(path.absolute()), "bytes": status.st_size, **times}


def stamp_of(entry: Mapping[str, Any]) -> Entry:
    """The stamp that an entry was made with; that of an earlier version has no path, and equals none."""
    return {key: entry.get(key) for key in ("path", "bytes", "mtime_ns", "ctime_ns")}


def check_unchanged(entry: Mapping[str, Any]) -> None:
    """Refuses a file that was changed since its entry was made, by a download that goes on, say.

    Raises:
        InputError: names it.
    """
    if stamp(Path(entry["path"])) != stamp_of(entry):
        raise InputError(
            f"{entry['path']} was changed while it was read. Start over when nothing writes to it: remove OUT.run."
        )


def label(entry: Mapping[str, Any]) -> str:
    """What an output is known by: its digest, or its stamp as long as there is none."""
    return str(entry["digest"]) or _unhashed(entry)


def _unhashed(entry: Mapping[str, Any]) -> str:
    return "{path}, not hashed yet: {bytes} bytes, mtime {mtime_ns}, ctime {ctime_ns}".format_map(stamp_of(entry))


def digest(path: Path, advance: Advance | None = None) -> str:
    """The digest of a file, as the records have it."""
    if path.suffix == ".safetensors":
        return f"blake3:{_blake3(path, READERS, None, advance)}"
    hashed = sha256_file(path)
    if advance:
        advance(path.stat().st_size)
    return hashed


def _blake3(path: Path, readers: int, threads: int | None, advance: Advance | None) -> str:
    """Read and not mapped: a mapped file counts as this process's memory, and kills it when it is cut short meanwhile.

    The threads have the priority of the one that calls this.
    """
    from blake3 import blake3

    hasher, size = blake3(max_threads=threads or blake3.AUTO), path.stat().st_size
    buffers = [bytearray(min(PIECE, size)) for _ in range(readers + 1)]  # one is hashed while the others are filled
    with path.open("rb", buffering=0) as file, ThreadPoolExecutor(readers) as pool:

        def read(number: int) -> memoryview:
            count = os.preadv(file.fileno(), [buffers[number % len(buffers)]], number * PIECE)
            return memoryview(buffers[number % len(buffers)])[:count]

        count = -(-size // PIECE)
        coming = deque(pool.submit(read, i) for i in range(min(readers, count)))
        for i in range(count):
            piece = coming.popleft().result()
            if i + readers < count:
                coming.append(pool.submit(read, i + readers))
            hasher.update(piece)
            if advance:
                advance(len(piece))
    return str(hasher.hexdigest())


class ShardHashes:
    """Hashes the shards that `fetch` left to be hashed, in the background.

    All at once where the page cache has room for them, else each when the work has come to it and reads it.
    Use as a context manager. What is hashed is in fetch's record at once: leaving early loses the shard under way, no more.

    Args:
        record: Of fetch.
        directory: Its folder.
    """

    def __init__(self, record: Record, directory: Path) -> None:
        self._record, self._directory = record, directory
        unhashed = {name: entry for name, entry in record.facts["hashed"].items() if not entry["digest"]}
        self._names = {Path(entry["path"]): name for name, entry in unhashed.items()}
        self._reached: SimpleQueue[Path | None] = SimpleQueue()
        self._hashed, self._nbytes = 0, sum(entry["bytes"] for entry in unhashed.values())
        self._stopped = threading.Event()
        self._pool = ThreadPoolExecutor(1, initializer=_give_way)

    def __enter__(self) -> "ShardHashes":
        if self._nbytes < available_memory_bytes() / 2:
            for path in self._names:
                self.reached(path)
        self._work: Future[None] = self._pool.submit(self._hash)
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._reached.put(None)
        self._pool.shutdown()

    def reached(self, path: Path) -> None:
        """The work reads this file now, so that its bytes come from the disk once."""
        self._reached.put(path)

    def finish(self, reporter: Reporter) -> None:
        """Hashes what is left, and waits.

        Raises:
            InputError: a file that was changed since `fetch` looked at it.
            OSError: a file that cannot be read.
        """
        for path in self._names:
            self.reached(path)
        self._reached.put(None)
        shown = 0
        with reporter.task("hash the inputs", self._nbytes) as progress:
            while not wait([self._work], timeout=0.5).done:
                shown, before = self._hashed, shown
                progress(shown - before)
        self._work.result()

    def _hash(self) -> None:
        left = dict(self._names)
        while left and (path := self._reached.get()) is not None:
            if name := left.pop(path, None):
                hashed = _blake3(path, THREADS_BESIDE, THREADS_BESIDE, self._advance)
                check_unchanged(self._record.facts["hashed"][name])  # else the hash is of something else
                self._keep(name, f"blake3:{hashed}")

    def _advance(self, nbytes: int) -> None:
        self._hashed += nbytes
        if self._stopped.is_set():
            raise InterruptedError("the hashing of the inputs was stopped")

    def _keep(self, name: str, hashed: str) -> None:
        facts = dict(self._record.facts)
        facts["hashed"] = facts["hashed"] | {name: facts["hashed"][name] | {"digest": hashed}}
        self._record = replace(self._record, outputs={**self._record.outputs, name: hashed}, facts=facts)
        self._record.save(self._directory)


def _give_way() -> None:
    """Lowers the priority of this thread, and of those that it starts, where threads have one of their own (Linux)."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


def settle(workspace: Path, fetched: str, others: tuple[str, ...]) -> None:
    """Puts the hashes of shards into the records that were written before they were known. Each file is the old or the new one.

    Args:
        workspace: The run's folder.
        fetched: The stage that has the hashes.
        others: The stages whose records may lack them.
    """
    record = read_record(workspace / fetched)
    if record is None:
        return
    known = {_unhashed(entry): entry["digest"] for entry in record.facts["hashed"].values() if entry["digest"]}
    for directory in (workspace / name for name in others):
        if (directory / STARTED).is_file() and (started := read_object(directory / STARTED)) != (new := _put(started, known)):
            write_object(directory / STARTED, new)
        if (old := read_record(directory)) and (identity := _put(old.identity, known)) != old.identity:
            replace(old, identity=identity, fingerprint=fingerprint(identity)).save(directory)


def _put(value: Any, known: Mapping[str, str]) -> Any:
    if isinstance(value, Mapping):
        return {key: _put(inner, known) for key, inner in value.items()}
    return known.get(value, value) if isinstance(value, str) else value
