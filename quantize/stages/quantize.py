"""quantize: the streaming engine makes every shard of the plan, the copied ones too. A killed run goes on where it was."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from assemble.checkpoint import Checkpoint
from assemble.errors import InputError
from quantize.console import Reporter, output_to
from quantize.errors import OutOfGPUMemoryError
from quantize.machine import find_gpu
from quantize.planning import build_plan, modelopt_table
from quantize.stage import Context, Record, Result
from quantize.stages import calibrate, fetch
from quantize.streaming.journal import stamp
from recipes.schema import Recipe


@dataclass(frozen=True)
class Task:
    """What every process of a run has to know. Plain data, so that one process can tell the others.

    Attributes:
        source: The BF16 checkpoint's directory.
        head: The directory of the checkpoint that the MTP head is taken from.
        recipe: The recipe.
        rows: The file of the calibration rows.
        directory: The stage's folder.
        device: `cuda` or `cpu`.
        store: Where the hidden states lie between layers: `device`, `host` or `disk`.
    """

    source: Path
    head: Path
    recipe: Recipe
    rows: Path
    directory: Path
    device: str
    store: str


def run(context: Context) -> Result:
    """Writes the shards.

    Raises:
        CoverageError: what was made is not what was planned.
        InputError: a weight, or an input, that no scale follows from; a source that changed.
    """
    from quantize.streaming.ranks import find_ranks

    source, head = fetch.opened(context.records["fetch"])
    facts = context.records["plan"].facts
    rows = context.directory_of("calibrate") / calibrate.FILE
    task = Task(
        source.root, head.root, context.recipe, rows, context.directory, str(facts["device"]), str(facts["activations"])
    )
    ranks = find_ranks()
    ranks.join()
    ranks.broadcast(task)
    result = Result(*work(task, context.reporter, context.reached))
    fetch.check_unchanged(context.records["fetch"])
    return result


def check_unchanged(record: Record, directory: Path) -> None:
    """Refuses shards that were changed since they were hashed.

    Raises:
        InputError: names the first.
    """
    for name, written in record.facts.get("written", {}).items():  # records of earlier versions have none
        if stamp(directory / name) != written:
            raise InputError(f"{directory / name} was changed after it was written. Start over: remove {directory.parent}.")


def work(
    task: Task, reporter: Reporter, reached: Callable[[Path], None] = lambda _: None
) -> tuple[dict[str, str], dict[str, Any]]:
    """This process's share of a task: all of it, where there is one process.

    Args:
        task: The task.
        reporter: Where progress goes.
        reached: Told of each of the source's files when it is first read.

    Returns:
        Shard name -> SHA-256, and facts for the record.
    """
    from quantize.streaming.ranks import find_ranks, local_device

    ranks = find_ranks()
    device = local_device(task.device)
    with output_to(task.directory / f"log-{ranks.rank}.txt"), _gpu_peak(device) as gpu, _enough_gpu_memory():
        from quantize.streaming import engine
        from quantize.streaming.activations import Store
        from quantize.streaming.journal import open_journal, remove_leftovers

        plan = build_plan(task.recipe, Checkpoint.open(task.source), Checkpoint.open(task.head))
        method = modelopt_table(task.recipe, plan.architecture).method
        batch_size = task.recipe.calibration.batch_size
        rows, store = np.load(task.rows), Store(task.store)
        job = engine.Job(plan, method, rows, batch_size, device, store, task.directory, engine.SAVE_SECONDS, reached)
        journal = open_journal(task.directory, job.states_bytes, ranks.rank)
        ranks.gather(None)  # everyone has read the journals
        if ranks.rank == 0:
            remove_leftovers(journal)
        ranks.gather(None)
        facts = engine.quantize(job, journal, ranks, reporter)
    shards: dict[str, str] = {}
    stamps: dict[str, dict[str, int]] = {}
    for some, theirs in ranks.gather((journal.shards, journal.stamps)):
        shards, stamps = shards | some, stamps | theirs
    everyone = ranks.gather({"device": device, **facts, **gpu})
    if ranks.rank == 0:
        journal.close()
    own = {**everyone[0], "activations": task.store, "written": dict(sorted(stamps.items()))}
    return dict(sorted(shards.items())), own | ({} if ranks.alone else {"ranks": everyone})


@contextlib.contextmanager
def _enough_gpu_memory() -> Iterator[None]:
    """Says what to do when there is not."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfGPUMemoryError(
            f"{str(error).splitlines()[0]} Use --device cpu, a larger GPU, or a recipe with a smaller calibration.batch_size."
        ) from error


@contextlib.contextmanager
def _gpu_peak(device: str) -> Iterator[dict[str, Any]]:
    """Measures the peak GPU memory of the block into the mapping it yields."""
    facts: dict[str, Any] = {}
    if device == "cpu":
        yield facts
        return
    import torch

    torch.cuda.set_device(device)
    torch.cuda.reset_peak_memory_stats()
    yield facts
    gpu = find_gpu()
    facts["gpu"] = gpu.name if gpu else torch.cuda.get_device_name()
    facts["gpu_peak_memory_bytes"] = torch.cuda.max_memory_allocated()
    facts["gpu_peak_reserved_bytes"] = torch.cuda.max_memory_reserved()
