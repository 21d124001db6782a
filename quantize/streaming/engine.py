"""The streaming engine: lm_head, then the decoder a layer at a time; each is read, run, quantized, written and dropped.

Three things go on at once: the next group of tensors is read, this one is computed, and the last one's packed tensors go to
the disk, together with the tensors that are copied as they are and never come near the model. A layer is run in BF16 on all
calibration rows; what its FP8 modules see is measured on the way. NVFP4 here is weight-only, so the weights alone decide it.
A GPU is never waited for between two layers: what was packed is looked at when the next layer is queued (`pending`).
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from assemble.architecture import LM_HEAD
from assemble.checkpoint import TensorInfo
from assemble.formats import FP8
from assemble.plan import AssemblyPlan, PlannedShard
from assemble.rules.scan import holds_special
from assemble.writer import copy_shard, sync_directory
from quantize.console import Reporter
from quantize.machine import free_disk_bytes
from quantize.streaming.activations import Activations, Store
from quantize.streaming.calibration import Calibration, own_rows
from quantize.streaming.decoder import Decoder
from quantize.streaming.journal import Journal
from quantize.streaming.modules import Packer, WeightError
from quantize.streaming.pending import Pending
from quantize.streaming.ranks import Ranks
from quantize.streaming.reading import Group, Reader, Reading, layer_group, tensor_group
from quantize.streaming.writing import ShardSink

SAVE_SECONDS = 120.0  # hidden states are saved for a later run when this much work would be lost otherwise


@dataclass(frozen=True)
class Job:
    """What is to be quantized, with what, and where to.

    Attributes:
        plan: The checkpoint to be.
        method: `max` or `mse`.
        rows: Calibration token ids [rows, T], int32.
        batch_size: Rows a forward pass.
        device: `cpu`, `cuda` or `cuda:N`.
        store: Where the hidden states lie between layers.
        directory: Where the shards go.
        save_seconds: How much work a kill may cost.
        reached: Told of each of the source's files when it is first read.
    """

    plan: AssemblyPlan
    method: str
    rows: npt.NDArray[np.int32]
    batch_size: int
    device: str
    store: Store
    directory: Path
    save_seconds: float
    reached: Callable[[Path], None] = lambda _: None

    @property
    def states_bytes(self) -> int:
        """The hidden states of all rows, BF16."""
        return self.rows.size * int(self.plan.architecture.text["hidden_size"]) * torch.bfloat16.itemsize


@dataclass(frozen=True)
class Step:
    """One group of tensors that is in memory at once: `layer` is None for lm_head."""

    layer: int | None
    prefix: str
    group: Group


def quantize(job: Job, journal: Journal, ranks: Ranks, reporter: Reporter) -> dict[str, Any]:
    """Makes every shard of the plan that the journal does not have.

    Returns:
        Facts for the record: seconds and bytes.

    Raises:
        CoverageError: what was made is not what was planned.
        InputError: a weight or an input that no scale follows from.
    """
    return _Run(job, journal, ranks, reporter).run()


class _Run:
    def __init__(self, job: Job, journal: Journal, ranks: Ranks, reporter: Reporter) -> None:
        self._job, self._journal, self._ranks, self._reporter = job, journal, ranks, reporter
        self._mine = [s for i, s in enumerate(job.plan.shards) if i % ranks.size == ranks.rank and s.name not in journal.shards]
        self._input_amax = {module: torch.tensor(amax) for module, amax in journal.input_amax.items()}  # float32 []
        self._last_to_run = _last_to_run(job.plan, journal)
        self._calibration: Calibration | None = None
        self._saved = time.monotonic()
        self._seconds = {"start": 0.0, "wait_for_read": 0.0, "forward": 0.0, "pack": 0.0, "finish": 0.0}

    def run(self) -> dict[str, Any]:
        """See `quantize`."""
        job, plan = self._job, self._job.plan
        quantized = [shard for shard in self._mine if shard.quantized]
        steps = [step for step in self._steps() if self._to_run(step) or _to_pack(step, quantized)]
        self._announce(steps)
        with ExitStack() as stack:
            copies = stack.enter_context(_Copies(plan, job.directory, self._journal.shard_finished))
            copies.start(shard for shard in self._mine if not shard.quantized)
            sink = stack.enter_context(ShardSink(quantized, job.directory, self._journal.shard_finished))
            reader = stack.enter_context(Reader(plan.source, torch.device(job.device), job.reached))
            advance = stack.enter_context(self._reporter.task("quantize", sum(step.group.nbytes for step in steps)))
            packer, pending = Packer(plan.architecture, plan.schemes, job.method, sink.wants), Pending(sink)
            speed = _Speed(plan.architecture.num_layers)
            readings = _ahead(reader, steps)
            with _Timed(self._seconds, "start"):  # while the first step is read
                decoder = Decoder(plan.architecture, job.device) if any(map(self._to_run, steps)) else None
            for step, reading in readings:
                self._step(step, reading, decoder, packer, pending)
                advance(step.group.nbytes, speed.reached(step))
                copies.check()
                sink.check()
            with _Timed(self._seconds, "finish"):
                pending.settle()
                sink.finish()
                copies.finish()
                self._ranks.gather(None)  # every shard is there before any process leaves
        seconds = {name: round(value, 2) for name, value in self._seconds.items()}
        run, rule = (self._calibration.layers_run, self._calibration.delta_rule) if self._calibration else (0, None)
        return {"seconds": seconds, "bytes_read": reader.bytes_read, "layers_run": run, "delta_rule": rule}

    def _steps(self) -> Iterator[Step]:
        plan = self._job.plan
        if LM_HEAD in plan.schemes:
            yield Step(None, "", tensor_group(plan.source, f"{LM_HEAD}.weight"))
        for i in range(plan.architecture.num_layers):
            yield Step(i, f"{plan.architecture.prefix}layers.{i}.", layer_group(plan.source, plan.architecture, i))

    def _announce(self, steps: Iterable[Step]) -> None:
        """Says that the source's files that no step reads are read now, if they are: their tensors are copied."""
        source = self._job.plan.source
        read = {source.path_of(place.tensor) for step in steps for place in step.group.places}
        for path in sorted({source.path_of(tensor) for tensor in source.values()} - read):
            self._job.reached(path)

    def _to_run(self, step: Step) -> bool:
        """Whether the layer has to be run: an input of it, or of a layer after it, is still to be measured."""
        return step.layer is not None and self._journal.next_layer <= step.layer <= self._last_to_run

    def _step(self, step: Step, reading: Reading, decoder: Decoder | None, packer: Packer, pending: Pending) -> None:
        with _Timed(self._seconds, "wait_for_read"):
            tensors = reading.tensors()
        if decoder and step.layer is not None and self._to_run(step):
            if self._calibration is None:
                with _Timed(self._seconds, "start"):
                    self._calibration = self._start(decoder)
            with _Timed(self._seconds, "forward"):
                self._measure(self._calibration, step.layer, step.prefix, tensors)
        with _Timed(self._seconds, "pack"):
            pending.settle()
            for made in packer.pack(step.prefix, tensors, self._input_amax):
                pending.add(made)
            if step.layer is None:
                pending.settle()  # lm_head's place is needed for the hidden states

    def _measure(self, calibration: Calibration, layer: int, prefix: str, tensors: Mapping[str, Tensor]) -> None:
        """Runs a layer; saves the hidden states behind it when it is time to."""
        schemes, names = self._job.plan.schemes, (name.removesuffix(".weight") for name in tensors)
        measured = {name for name in names if schemes.get(prefix + name) == FP8}
        last = layer == self._last_to_run
        self._input_amax |= {prefix + n: amax for n, amax in calibration.run(layer, tensors, measured, last=last).items()}
        if self._save_due() and not last:
            self._save(calibration.states, layer + 1)

    def _save_due(self) -> bool:
        """Whether to save now: the same for all ranks. A disk that the shards will fill is left to them."""
        job = self._job
        left = sum(shard.nbytes for shard in job.plan.shards if shard.name not in self._journal.shards)
        room = free_disk_bytes(job.directory) - left - job.states_bytes
        waited, lack = self._ranks.largest([time.monotonic() - self._saved, -float(room)])
        return waited > job.save_seconds and lack < 0

    def _save(self, states: Activations, layer: int) -> None:
        """Saves the hidden states of all ranks before a layer: complete under their name, or not there."""
        path = self._journal.states_path(layer)
        temporary = path.with_name(path.name + ".tmp")
        try:
            states.save(temporary, self._ranks)
            self._ranks.gather(None)  # every rank's rows are on the disk
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        if self._ranks.rank == 0:
            temporary.replace(path)
            sync_directory(path.parent)
            self._journal.states_saved(layer, {module: float(amax) for module, amax in self._input_amax.items()})
        self._saved = time.monotonic()

    def _start(self, decoder: Decoder) -> Calibration:
        """The hidden states before the first layer that is run."""
        job, architecture = self._job, self._job.plan.architecture
        if decoder.device.type == "cuda":
            torch.cuda.empty_cache()  # lm_head's place is as large as the states, and too small for them: without it, both stay
        rows = own_rows(job.rows, job.batch_size, self._ranks)
        path = job.directory / f"activations-{self._ranks.rank}.bin"
        states = Activations((*rows.shape, decoder.hidden_size), job.batch_size, decoder.device, job.store, path)
        if self._journal.next_layer:
            states.restore(self._journal.states_path(self._journal.next_layer), self._ranks)
        else:
            states.embed(decoder, job.plan.source, f"{architecture.prefix}embed_tokens.weight", rows)
        return Calibration(decoder, states, self._ranks)


def _last_to_run(plan: AssemblyPlan, journal: Journal) -> int:
    """The last layer with an FP8 module that some unfinished shard wants, of any process, and whose input is not measured."""
    wanted = {t.name for shard in plan.shards if shard.quantized and shard.name not in journal.shards for t in shard.tensors}
    modules = (m for m, s in plan.schemes.items() if s == FP8 and m not in journal.input_amax and f"{m}.weight" in wanted)
    prefix = f"{plan.architecture.prefix}layers."
    return max((int(m.removeprefix(prefix).partition(".")[0]) for m in modules), default=-1)


def _to_pack(step: Step, shards: Iterable[PlannedShard]) -> bool:
    """Whether some shard still wants what the step makes."""
    prefix = step.prefix or f"{LM_HEAD}."
    return any(t.name.startswith(prefix) for shard in shards for t in shard.tensors)


class _Speed:
    """Layer and gigabytes a second, for the progress line."""

    def __init__(self, num_layers: int) -> None:
        self._num_layers, self._started, self._nbytes = num_layers, time.monotonic(), 0

    def reached(self, step: Step) -> str:
        """What is done, after a step."""
        self._nbytes += step.group.nbytes
        speed = self._nbytes / 1e9 / max(time.monotonic() - self._started, 1e-3)
        where = "lm_head" if step.layer is None else f"layer {step.layer + 1} of {self._num_layers}"
        return f"{where}, {speed:.2f} GB/s"


class _Copies:
    """Copies shards of unquantized tensors in the background. Use as a context manager; leaving it early stops them."""

    def __init__(self, plan: AssemblyPlan, directory: Path, finished: Callable[[str, str], None]) -> None:
        self._plan, self._directory, self._finished = plan, directory, finished
        self._pool, self._stopped = ThreadPoolExecutor(2), threading.Event()
        self._copies: list[Future[None]] = []

    def __enter__(self) -> "_Copies":
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._pool.shutdown(cancel_futures=True)

    def start(self, shards: Iterable[PlannedShard]) -> None:
        """Begins with these."""
        self._copies = [self._pool.submit(self._copy, shard) for shard in shards]

    def check(self) -> None:
        """Raises what one of them met, a full disk, say."""
        for copy in self._copies:
            if copy.done():
                copy.result()

    def finish(self) -> None:
        """Waits for all."""
        for copy in self._copies:
            copy.result()

    def _copy(self, shard: PlannedShard) -> None:
        def look(tensor: TensorInfo, piece: bytes) -> None:
            if self._stopped.is_set():
                raise InterruptedError(f"the copying of {shard.name} was stopped")
            if holds_special(piece, tensor.dtype):
                raise WeightError(tensor.name, "holds NaN or infinity")

        self._finished(shard.name, copy_shard(self._plan, shard, self._directory, look))


class _Timed:
    """Adds the seconds of a block to a table."""

    def __init__(self, seconds: dict[str, float], name: str) -> None:
        self._seconds, self._name = seconds, name

    def __enter__(self) -> None:
        self._started = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._seconds[self._name] += time.monotonic() - self._started


def _ahead(reader: Reader, steps: list[Step]) -> Iterator[tuple[Step, Reading]]:
    """Each step with its tensors on their way. The first one's start now, and the next one's when this one's are there."""
    coming = deque(reader.start(step.group) for step in steps[:1])

    def each() -> Iterator[tuple[Step, Reading]]:
        for i, step in enumerate(steps):
            reading = coming.popleft()
            reading.wait()
            coming.extend(reader.start(following.group) for following in steps[i + 1 : i + 2])
            yield step, reading

    return each()
