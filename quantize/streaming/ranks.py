"""Several processes, one a GPU, as `torchrun` starts them: who does what, and the little they tell each other.

What they exchange is a few numbers a layer and the names of finished shards, so it goes over gloo, on the host.
"""

import contextlib
import datetime as dt
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from quantize.errors import CheckFailedError

TIMEOUT = dt.timedelta(days=2)  # the others wait while the first fetches and verifies


class RankError(CheckFailedError):
    """Another process of the run ended before its work was done."""


@contextlib.contextmanager
def _meeting() -> Iterator[None]:
    """Says what it means when the others cannot be reached: they are gone."""
    try:
        yield
    except RuntimeError as error:
        raise RankError(
            "another process of this run failed or was stopped; its own message says why. What is finished is kept: the same "
            "command continues."
        ) from error


@dataclass(frozen=True)
class Ranks:
    """This process among `size`.

    Attributes:
        rank: Its number; 0 runs the pipeline, the others take part in the quantize stage.
        size: How many there are.
    """

    rank: int = 0
    size: int = 1

    @property
    def alone(self) -> bool:
        """Whether there is one process only."""
        return self.size == 1

    def join(self) -> None:
        """Meets the others."""
        if not self.alone:
            import torch.distributed as dist
            import torch.distributed.nn  # noqa: F401 - imported later, its default arguments would keep the group when all part

            if not dist.is_initialized():
                with _meeting():
                    dist.init_process_group("gloo", rank=self.rank, world_size=self.size, timeout=TIMEOUT)

    def leave(self) -> None:
        """Parts from the others; gloo's threads end here. Those that a process still has when Python ends can abort it."""
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()

    def broadcast(self, value: Any) -> Any:
        """What rank 0 gives, for everyone."""
        if self.alone:
            return value
        import torch.distributed as dist

        box = [value]
        with _meeting():
            dist.broadcast_object_list(box, src=0)
        return box[0]

    def largest(self, values: list[float]) -> list[float]:
        """The largest of each number over all ranks."""
        if self.alone or not values:
            return values
        import torch
        import torch.distributed as dist

        tensor = torch.tensor(values, dtype=torch.float32)
        with _meeting():
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor.tolist()

    def gather(self, value: Any) -> list[Any]:
        """Everyone's value, for everyone, by rank."""
        if self.alone:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * self.size
        with _meeting():
            dist.all_gather_object(values, value)
        return values


def find_ranks() -> Ranks:
    """What `torchrun` says in the environment; one process without it."""
    return Ranks(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))


def local_device(device: str) -> str:
    """`cuda:N` for this process's GPU where `device` is `cuda`."""
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if device == "cuda" else device
