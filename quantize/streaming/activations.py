"""The hidden states of all calibration rows, between two layers: on the device, on the host, or in a file.

They are changed in place, a batch at a time. A batch keeps the recipe's size, since BF16 matrix products round differently
for other shapes, and with them the measured scales.
"""

import os
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from assemble.checkpoint import Checkpoint
from quantize.streaming.decoder import Decoder
from quantize.streaming.ranks import Ranks
from quantize.streaming.reading import DTYPES


class Store(StrEnum):
    """Where the hidden states of all rows lie."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class Activations:
    """Hidden states [rows, T, H], BF16.

    Args:
        shape: (rows, T, H).
        batch_size: Rows a batch.
        device: Where they are computed.
        store: Where they lie.
        path: The file, for `disk`.
    """

    def __init__(self, shape: tuple[int, int, int], batch_size: int, device: torch.device, store: Store, path: Path) -> None:
        self._batch_size, self._device = batch_size, device
        if store is Store.DISK and shape[0]:
            self._states = _mapped(path, shape)
        else:
            pinned = store is Store.HOST and device.type == "cuda"
            where = device if store is Store.DEVICE else torch.device("cpu")
            self._states = torch.empty(shape, dtype=torch.bfloat16, device=where, pin_memory=pinned)

    def embed(self, decoder: Decoder, source: Checkpoint, name: str, rows: npt.NDArray[np.int32]) -> None:
        """Fills in the embeddings of token ids [rows, T]; of the tensor `name`, only the rows of tokens that occur are read."""
        tensor = source[name]
        dtype, (entries, width) = DTYPES[tensor.dtype], tensor.shape
        table = np.memmap(source.path_of(tensor), np.uint8, "r", tensor.start, (entries, width * dtype.itemsize))
        for part in self._parts():
            tokens, places = np.unique(rows[part], return_inverse=True)
            weight = torch.from_numpy(table[tokens]).to(self._device).view(dtype)
            self._states[part] = decoder.embed(weight, torch.from_numpy(places.reshape(rows[part].shape)))

    def batches(self) -> Iterator[tuple[Tensor, slice]]:
        """Each batch on the device, and where it belongs."""
        for part in self._parts():
            yield self._states[part].to(self._device, non_blocking=True), part

    def put(self, part: slice, hidden: Tensor) -> None:
        """Replaces a batch."""
        self._states[part] = hidden

    def save(self, path: Path, ranks: Ranks) -> None:
        """Writes this rank's rows to their places in a file of all rows, which so is the same for any number of ranks."""
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o666), "wb") as file:
            for part in self._parts():
                file.seek(self._first_row(part, ranks) * self._states[0].nbytes)
                file.write(self._states[part].cpu().view(torch.uint8).numpy().data)
            file.flush()
            os.fsync(file.fileno())

    def restore(self, path: Path, ranks: Ranks) -> None:
        """Reads this rank's rows from what `save` wrote, on however many ranks."""
        saved = np.memmap(path, np.uint16, "r").reshape(-1, *self._states.shape[1:])
        for part in self._parts():
            first = self._first_row(part, ranks)
            rows = np.array(saved[first : first + part.stop - part.start])
            self._states[part] = torch.from_numpy(rows).view(torch.bfloat16)

    def _first_row(self, part: slice, ranks: Ranks) -> int:
        """Where a batch starts among the rows of all ranks, which `own_rows` deals out a batch at a time."""
        batch = int(part.start) // self._batch_size
        return (batch * ranks.size + ranks.rank) * self._batch_size

    def _parts(self) -> Iterator[slice]:
        rows = len(self._states)
        for start in range(0, rows, self._batch_size):
            yield slice(start, min(start + self._batch_size, rows))


def _mapped(path: Path, shape: tuple[int, int, int]) -> Tensor:
    """BF16 numbers in a file, which goes when the tensor does, however the process ends.

    Raises:
        OSError: the disk has no room. Without taking it now, a disk that is full later would kill the process (SIGBUS).
    """
    count = shape[0] * shape[1] * shape[2]
    try:
        with path.open("wb") as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, count * torch.bfloat16.itemsize)
        return torch.from_file(str(path), shared=True, size=count, dtype=torch.bfloat16).view(shape)
    finally:
        path.unlink(missing_ok=True)
