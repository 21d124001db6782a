"""What a streaming run has done so far, on the disk, so that a killed one goes on where it was.

`journal-0.json` (one a process) names the finished shards with their digests, the input magnitudes measured so far, and,
from time to time, a file with all hidden states before some layer. Weights need no more than that: those of shards that
were not finished are quantized again.
"""

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from assemble.errors import InputError
from assemble.jsonfile import read_object, write_object
from assemble.writer import sha256_file


@dataclass
class Journal:
    """The journal of one process in a folder.

    Attributes:
        directory: The folder.
        rank: The process's number.
        shards: Finished shard -> SHA-256, those of earlier runs and other processes included.
        input_amax: FP8 module -> largest magnitude of its input, for the layers before `next_layer`.
        next_layer: The layer that the saved hidden states are the input of; 0 when none are saved.
        stamps: Finished shard -> its size and time when it was hashed in this run, for those that this process hashed.
    """

    directory: Path
    rank: int = 0
    shards: dict[str, str] = field(default_factory=dict)
    input_amax: dict[str, float] = field(default_factory=dict)
    next_layer: int = 0
    stamps: dict[str, dict[str, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    def states_path(self, layer: int) -> Path:
        """The file of the hidden states before a layer."""
        return self.directory / f"hidden-{layer:04d}.bin"

    def shard_finished(self, name: str, sha256: str) -> None:
        """Notes a finished shard."""
        with self._lock:
            self.shards[name], self.stamps[name] = sha256, stamp(self.directory / name)
            self._save()

    def states_saved(self, layer: int, input_amax: Mapping[str, float]) -> None:
        """Notes that the hidden states before a layer are saved; older ones are removed."""
        with self._lock:
            self.next_layer, self.input_amax = layer, dict(input_amax)
            self._save()
        for path in self.directory.glob("hidden-*.bin"):
            if path != self.states_path(layer):
                path.unlink()

    def close(self) -> None:
        """Removes what is large and only an unfinished run needs.

        The journals stay: whoever kills the run before its record is written finds every shard finished.
        """
        for path in self.directory.glob("hidden-*.bin*"):
            path.unlink(missing_ok=True)

    def _save(self) -> None:
        state = {"shards": self.shards, "input_amax": self.input_amax, "next_layer": self.next_layer}
        write_object(self.directory / f"journal-{self.rank}.json", state)


def open_journal(directory: Path, states_bytes: int, rank: int = 0) -> Journal:
    """What earlier runs in this folder have done and is still there, as they left it: finished shards are hashed again.

    Args:
        directory: The folder.
        states_bytes: The size of the file of all hidden states; one of another size is not taken.
        rank: Whose journal is opened.
    """
    journal = Journal(directory, rank)
    for path in sorted(directory.glob("journal-*.json")):
        state = _read(path)
        journal.shards |= _unchanged(directory, state.shards)
        states = journal.states_path(state.next_layer)
        if state.next_layer > journal.next_layer and states.is_file() and states.stat().st_size == states_bytes:
            journal.next_layer, journal.input_amax = state.next_layer, state.input_amax
    journal.stamps = {name: stamp(directory / name) for name in journal.shards}
    return journal


def stamp(path: Path) -> dict[str, int]:
    """What changes when a file is written to. No ctime: a hard link changes it."""
    status = path.stat()
    return {"bytes": status.st_size, "mtime_ns": status.st_mtime_ns}


def remove_leftovers(journal: Journal) -> None:
    """Removes the files of an earlier run that its journals do not speak of."""
    keep = {journal.states_path(journal.next_layer).name, *journal.shards}
    for pattern in ("*.safetensors*", "hidden-*", "activations-*"):
        for path in journal.directory.glob(pattern):
            if path.name not in keep:
                path.unlink()


def _unchanged(directory: Path, shards: Mapping[str, str]) -> dict[str, str]:
    there = [name for name in shards if (directory / name).is_file()]
    with ThreadPoolExecutor() as pool:
        digests = dict(zip(there, pool.map(lambda name: sha256_file(directory / name), there), strict=True))
    return {name: digest for name, digest in digests.items() if digest == shards[name]}


def _read(path: Path) -> Journal:
    """An unreadable journal counts as an empty one: its work is done again."""
    try:
        return Journal(path.parent, **read_object(path))
    except (InputError, TypeError):
        return Journal(path.parent)
