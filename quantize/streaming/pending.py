"""Packed tensors between the device and the shards: they go on when the magnitudes that their scales follow from are checked.

On a GPU that takes no waiting: what is queued there is looked at when the next layer is queued too, so that the GPU always has
something to do while Python goes from layer to layer.
"""

from collections import deque
from typing import Any

import torch
from torch import Tensor

from quantize.streaming.modules import Made
from quantize.streaming.writing import ShardSink

LIMIT = 256_000_000  # packed bytes that may wait to be checked


class Pending:
    """What was packed and is still to be checked.

    Args:
        sink: Where it goes then.
    """

    def __init__(self, sink: ShardSink) -> None:
        self._sink = sink
        self._waiting: deque[tuple[Made, Tensor, Any]] = deque()
        self._nbytes = 0

    def add(self, made: Made) -> None:
        """Takes packed tensors in; checks older ones where too much waits. On a CPU nothing waits.

        Raises:
            InputError: as `settle`.
        """
        device = next(iter(made.tensors.values())).device
        magnitudes = made.magnitudes().to("cpu", non_blocking=True)
        ready = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
        self._waiting.append((made, magnitudes, ready))
        self._nbytes += _nbytes(made)
        while self._waiting and (ready is None or self._nbytes > LIMIT):
            self._settle_first()

    def settle(self) -> None:
        """Checks all of it and hands it to the sink.

        Raises:
            InputError: a weight or an input that no scale follows from.
        """
        while self._waiting:
            self._settle_first()

    def _settle_first(self) -> None:
        made, magnitudes, ready = self._waiting.popleft()
        if ready is not None:
            ready.synchronize()
        made.check(magnitudes)
        self._nbytes -= _nbytes(made)
        self._sink.write(made.tensors, ready)


def _nbytes(made: Made) -> int:
    return sum(tensor.nbytes for tensor in made.tensors.values())
