"""A layer's tensors from the source's shards, while another layer is computed.

What belongs together (a decoder layer, or lm_head) is read into one flat buffer on the device, as the planner of that
buffer, `Group`, laid it out; the tensors are views of it. On a GPU the bytes come through a few pinned pieces, each read and
sent on by a thread of its own, so that the host never holds a layer. Routed experts are laid out as transformers holds them,
fused, whichever way the checkpoint stores them: each goes straight to its place in the fused tensor.
"""

import errno
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from assemble.architecture import Architecture, Shape
from assemble.checkpoint import Checkpoint, TensorInfo

PIECE = 8 * 1024 * 1024  # bytes a thread reads at once
THREADS = 8
ALIGNMENT = 256
DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "F16": torch.float16}


@dataclass(frozen=True)
class Place:
    """Where a stored tensor goes in a group's buffer, in bytes."""

    tensor: TensorInfo
    start: int


@dataclass(frozen=True)
class View:
    """A tensor of a group: a part of its buffer."""

    start: int
    dtype: torch.dtype
    shape: Shape


@dataclass(frozen=True)
class Group:
    """The layout of tensors that are read together.

    Attributes:
        views: Name -> where the tensor lies in the buffer.
        places: What is read to where.
        nbytes: The buffer's size.
    """

    views: Mapping[str, View]
    places: tuple[Place, ...]
    nbytes: int


def layer_group(checkpoint: Checkpoint, architecture: Architecture, index: int) -> Group:
    """A decoder layer of a BF16 checkpoint, by the names that transformers' layer has for its parameters.

    Raises:
        KeyError: a tensor that the checkpoint lacks; planning refused such a checkpoint before.
    """
    prefix = f"{architecture.prefix}layers.{index}."
    names = [name for name in architecture.body_tensors if name.startswith(prefix)]
    fused: dict[str, tuple[Shape, list[tuple[TensorInfo, int]]]] = {}
    for name in names:
        tensor, inside = checkpoint[name], name.removeprefix(prefix)
        if architecture.split_experts and inside.startswith("mlp.experts."):
            _add_expert(fused, architecture, inside, tensor)
        else:
            fused[inside] = (tensor.shape, [(tensor, 0)])
    return _lay_out(fused)


def tensor_group(checkpoint: Checkpoint, name: str) -> Group:
    """A single tensor, by its own name."""
    return _lay_out({name: (checkpoint[name].shape, [(checkpoint[name], 0)])})


def _add_expert(
    fused: dict[str, tuple[Shape, list[tuple[TensorInfo, int]]]], architecture: Architecture, name: str, tensor: TensorInfo
) -> None:
    """Puts one expert's projection into the fused tensor: gate above up in `gate_up_proj` [E, 2I, H]."""
    expert, projection = name.removeprefix("mlp.experts.").removesuffix(".weight").split(".")
    rows, columns = tensor.shape
    count, down = architecture.num_experts, projection == "down_proj"
    shape = (count, rows, columns) if down else (count, 2 * rows, columns)
    half = {"gate_proj": 0, "up_proj": 1, "down_proj": 0}[projection]
    target = "mlp.experts.down_proj" if down else "mlp.experts.gate_up_proj"
    offset = int(expert) * (1 if down else 2) * tensor.nbytes + half * tensor.nbytes
    fused.setdefault(target, (shape, []))[1].append((tensor, offset))


def _lay_out(tensors: Mapping[str, tuple[Shape, list[tuple[TensorInfo, int]]]]) -> Group:
    views, places, end = {}, [], 0
    for name, (shape, parts) in tensors.items():
        dtype = DTYPES[parts[0][0].dtype]
        views[name] = View(end, dtype, shape)
        places += [Place(tensor, end + offset) for tensor, offset in parts]
        end += math.ceil(math.prod(shape) * dtype.itemsize / ALIGNMENT) * ALIGNMENT
    return Group(views, tuple(places), end)


class Reader:
    """Reads groups into the device's memory, in the background. Use as a context manager.

    Args:
        checkpoint: Where from.
        device: Where to.
        reached: Told of each file when it is first read.
    """

    def __init__(self, checkpoint: Checkpoint, device: torch.device, reached: Callable[[Path], None] = lambda _: None) -> None:
        self._checkpoint, self._device, self._reached = checkpoint, device, reached
        self._files: dict[Path, int] = {}
        self._opening = threading.Lock()
        self._pool = ThreadPoolExecutor(THREADS if device.type == "cuda" else 2)
        self._local = threading.local()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.bytes_read = 0

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        for descriptor in self._files.values():
            os.close(descriptor)

    def start(self, group: Group) -> "Reading":
        """Starts to read a group; its buffer is taken now."""
        buffer = torch.empty(group.nbytes, dtype=torch.uint8, device=self._device)
        if self._stream is not None:  # the buffer may have been another's: what still reads it comes first
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self.bytes_read += sum(place.tensor.nbytes for place in group.places)
        futures = [self._pool.submit(self._read, buffer, piece) for piece in _pieces(group.places)]
        return Reading(group, buffer, futures)

    def read(self, group: Group) -> dict[str, Tensor]:
        """Reads a group and waits for it."""
        return self.start(group).tensors()

    def _read(self, buffer: Tensor, piece: tuple[TensorInfo, int, int, int]) -> None:
        tensor, offset, start, nbytes = piece
        descriptor = self._open(self._checkpoint.path_of(tensor))
        part = buffer[start : start + nbytes]
        if self._stream is None:
            _fill(part, descriptor, tensor, offset)
            return
        staging: Tensor | None = getattr(self._local, "staging", None)
        if staging is None:
            staging = self._local.staging = torch.empty(PIECE, dtype=torch.uint8, pin_memory=True)
        _fill(staging[:nbytes], descriptor, tensor, offset)
        with torch.cuda.stream(self._stream):
            part.copy_(staging[:nbytes], non_blocking=True)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
        done.synchronize()

    def _open(self, path: Path) -> int:
        with self._opening:
            if path not in self._files:
                self._files[path] = os.open(path, os.O_RDONLY)
                self._reached(path)
            return self._files[path]


@dataclass
class Reading:
    """A group on its way."""

    group: Group
    buffer: Tensor | None
    futures: list[Future[None]]

    def wait(self) -> None:
        """Waits for the bytes.

        Raises:
            OSError: a file that cannot be read, or ends too early.
        """
        for future in self.futures:
            future.result()

    def tensors(self) -> dict[str, Tensor]:
        """Waits for the bytes, and hands them over, once: the tensors by name, views of one buffer that lives as they do."""
        self.wait()
        if self.buffer is None:
            raise ValueError("the tensors of a group can be taken once")
        buffer, self.buffer = self.buffer, None
        return {name: _view(buffer, view) for name, view in self.group.views.items()}


def _view(buffer: Tensor, view: View) -> Tensor:
    nbytes = math.prod(view.shape) * view.dtype.itemsize
    return buffer[view.start : view.start + nbytes].view(view.dtype).view(view.shape)


def read_layer(checkpoint: Checkpoint, architecture: Architecture, index: int) -> dict[str, Tensor]:
    """A decoder layer's tensors on the host, by their names inside the layer; dtypes as stored, routed experts fused."""
    with Reader(checkpoint, torch.device("cpu")) as reader:
        return reader.read(layer_group(checkpoint, architecture, index))


def read_tensor(checkpoint: Checkpoint, name: str) -> Tensor:
    """One BF16, F16 or F32 tensor on the host."""
    with Reader(checkpoint, torch.device("cpu")) as reader:
        return reader.read(tensor_group(checkpoint, name))[name]


def _pieces(places: Iterable[Place]) -> Iterator[tuple[TensorInfo, int, int, int]]:
    """Tensor, offset inside it, place in the buffer, bytes: pieces that fit a staging buffer."""
    for place in places:
        for offset in range(0, place.tensor.nbytes, PIECE):
            yield place.tensor, offset, place.start + offset, min(PIECE, place.tensor.nbytes - offset)


def _fill(part: Tensor, descriptor: int, tensor: TensorInfo, offset: int) -> None:
    target, done = part.numpy().data, 0
    while done < len(target):
        count = os.preadv(descriptor, [target[done:]], tensor.start + offset + done)
        if not count:
            raise OSError(errno.EIO, f"the file of tensor {tensor.name} ends too early")
        done += count
