"""Work on parts of a tensor, spread over the processor's cores.

PyTorch spreads each single operation over the cores and waits for all of them after each, thousands of times a second here:
on a machine that does something else as well, most of the time goes to waiting. So each core gets whole parts instead, and
operations inside a part run on one core.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import torch


def for_each(work: Callable[[slice], None], parts: Iterable[slice], device: torch.device) -> None:
    """Does the work for each part: one after the other on a GPU, which is fast enough, several at once on a CPU."""
    if device.type != "cpu":
        for part in parts:
            work(part)
        return
    cores = torch.get_num_threads()  # of this thread; the pool's threads have a setting of their own
    with ThreadPoolExecutor(cores, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for _ in pool.map(work, parts):
            pass
