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
        if store is Store.DISK:
            count = shape[0] * shape[1] * shape[2]
            self._states = torch.from_file(str(path), shared=True, size=count, dtype=torch.bfloat16).view(shape)
        else:
            pinned = store is Store.HOST and device.type == "cuda"
            where = device if store is Store.DEVICE else torch.device("cpu")
            self._states = torch.empty(shape, dtype=torch.bfloat16, device=where, pin_memory=pinned)

    def embed(self, decoder: Decoder, source: Checkpoint, name: str, rows: npt.NDArray[np.int32]) -> None:
        """Fills in the embeddings of token ids [rows, T]; of the tensor `name`, only the rows of tokens that occur are read."""
        tensor = source[name]
        table = np.memmap(source.path_of(tensor), np.uint16, "r", tensor.start, tensor.shape)
        for part in self._parts():
            tokens, places = np.unique(rows[part], return_inverse=True)
            weight = torch.from_numpy(table[tokens]).view(torch.bfloat16)
            self._states[part] = decoder.embed(weight, torch.from_numpy(places.reshape(rows[part].shape)))

    def batches(self) -> Iterator[tuple[Tensor, slice]]:
        """Each batch on the device, and where it belongs."""
        for part in self._parts():
            yield self._states[part].to(self._device, non_blocking=True), part

    def put(self, part: slice, hidden: Tensor) -> None:
        """Replaces a batch."""
        self._states[part] = hidden

    def save(self, path: Path) -> None:
        """Writes them to a file, complete under its name or not there."""
        temporary = path.with_name(path.name + ".tmp")
        with temporary.open("wb") as file:
            for part in self._parts():
                file.write(self._states[part].cpu().view(torch.uint8).numpy().data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)

    def restore(self, path: Path) -> None:
        """Reads what `save` wrote."""
        saved = np.memmap(path, np.uint16, "r", shape=tuple(self._states.shape))
        for part in self._parts():
            self._states[part] = torch.from_numpy(np.array(saved[part])).view(torch.bfloat16)

    def _parts(self) -> Iterator[slice]:
        rows = len(self._states)
        for start in range(0, rows, self._batch_size):
            yield slice(start, min(start + self._batch_size, rows))
