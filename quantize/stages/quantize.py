"""quantize: ModelOpt calibrates and packs; each quantized shard is written once, as the plan laid it out."""

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from assemble.plan import AssemblyPlan
from assemble.writer import ShardWriter
from quantize import ptq
from quantize.console import Reporter, output_to
from quantize.errors import OutOfGPUMemoryError
from quantize.machine import find_gpu
from quantize.model import load_model
from quantize.modelopt_recipe import ModelOptRecipe
from quantize.planning import modelopt_table
from quantize.stage import Context, Result
from quantize.stages import calibrate
from quantize.stages.plan import planned

QUEUED_WRITES = 4  # modules' worth of packed bytes that may wait for the disk


def run(context: Context) -> Result:
    """Writes the quantized shards.

    Raises:
        CoverageError: ModelOpt quantized other modules than planned.
    """
    plan = planned(context, context.records["fetch"])
    device = str(context.records["plan"].facts["device"])
    rows = np.load(context.directory_of("calibrate") / calibrate.FILE)
    reporter, seconds = context.reporter, dict[str, float]()
    with output_to(context.directory / "log.txt"), _gpu_peak(device) as gpu, _enough_gpu_memory():
        with _timed("load", seconds):
            model = load_model(plan.source.root, plan.architecture, device, reporter)
        recipe = modelopt_table(context.recipe, plan.architecture)
        with _timed("calibrate", seconds), reporter.task("calibrate", len(rows)) as progress:
            ptq.calibrate_and_quantize(model, recipe, rows, context.recipe.calibration.batch_size, progress)
        ptq.check_coverage(model, plan.architecture, plan.listed, recipe)
        with _timed("export", seconds):
            outputs = _write_shards(model, plan, recipe, context.directory, reporter)
    return Result(outputs, {"device": device, "seconds": seconds, **gpu})


def _write_shards(
    model: Any, plan: AssemblyPlan, recipe: ModelOptRecipe, directory: Path, reporter: Reporter
) -> dict[str, str]:
    """Exports module by module, while earlier modules are written and finished shards are hashed.

    Returns:
        Shard name -> SHA-256 of the file.
    """
    total = sum(shard.nbytes for shard in plan.shards if shard.quantized)
    with reporter.task("export", total) as progress, contextlib.closing(_Sink(plan, directory)) as sink:
        for tensors in ptq.export_modules(model, plan.architecture, plan.listed, recipe):
            sink.write({name: _checked(name, tensor, sink) for name, tensor in tensors.items()})
            progress(sum(sink.specs[name].nbytes for name in tensors))
        return sink.finish()


class _Sink:
    """Writes packed tensors to their shards from a thread of its own; commits and hashes a shard once it is whole."""

    def __init__(self, plan: AssemblyPlan, directory: Path) -> None:
        shards = [shard for shard in plan.shards if shard.quantized]
        self.specs = {t.name: t for shard in shards for t in shard.tensors}
        self._home = {t.name: shard for shard in shards for t in shard.tensors}
        self._names = [shard.name for shard in shards]
        self._directory = directory
        self._writers: dict[str, ShardWriter] = {}
        self._disk, self._hashing = ThreadPoolExecutor(1), ThreadPoolExecutor(2)
        self._queue: list[Future[None]] = []
        self._digests: dict[str, Future[str]] = {}

    def write(self, tensors: dict[str, memoryview]) -> None:
        """Queues one module's tensors; waits while too much is queued."""
        self._queue.append(self._disk.submit(self._write, tensors))
        while len(self._queue) > QUEUED_WRITES:
            self._queue.pop(0).result()

    def _write(self, tensors: dict[str, memoryview]) -> None:
        for name, data in tensors.items():
            shard = self._home[name]
            if shard.name not in self._writers:
                self._writers[shard.name] = ShardWriter(self._directory / shard.name, shard.tensors)
            self._writers[shard.name].write(name, data)
        for shard_name in {self._home[name].name for name in tensors}:
            if self._writers[shard_name].complete:
                self._writers[shard_name].commit()
                self._digests[shard_name] = self._hashing.submit(self._writers[shard_name].sha256)

    def finish(self) -> dict[str, str]:
        """Waits for the disk and returns the digests, by shard.

        Raises:
            CoverageError: a shard did not become whole.
        """
        for write in self._queue:
            write.result()
        if unfinished := [name for name in self._names if name not in self._digests]:
            raise ptq.CoverageError(f"the model did not yield every planned module: {unfinished[0]} is incomplete")
        return {name: self._digests[name].result() for name in self._names}

    def close(self) -> None:
        """Ends the threads; removes what was not committed."""
        self._disk.shutdown(cancel_futures=True)
        self._hashing.shutdown(cancel_futures=True)
        for writer in self._writers.values():
            writer.abandon()


def _checked(name: str, tensor: Any, sink: _Sink) -> memoryview:
    """The tensor's bytes, when its dtype and shape are the planned ones."""
    spec = sink.specs[name]
    kinds = {"U8": "torch.uint8", "F8_E4M3": "torch.float8_e4m3fn", "F32": "torch.float32"}
    if str(tensor.dtype) != kinds[spec.dtype] or tuple(tensor.shape) != spec.shape:
        found = f"{tensor.dtype} {tuple(tensor.shape)}"
        raise ptq.CoverageError(f"ModelOpt exported {name} as {found}, planned {spec.dtype} {spec.shape}")
    return ptq.tensor_bytes(tensor)


@contextlib.contextmanager
def _timed(name: str, seconds: dict[str, float]) -> Iterator[None]:
    started = time.monotonic()
    yield
    seconds[name] = round(time.monotonic() - started, 1)


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
    if device != "cuda":
        yield facts
        return
    import torch

    torch.cuda.reset_peak_memory_stats()
    yield facts
    gpu = find_gpu()
    facts["gpu"] = gpu.name if gpu else torch.cuda.get_device_name()
    facts["gpu_peak_memory_bytes"] = torch.cuda.max_memory_allocated()
