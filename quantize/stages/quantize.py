"""quantize: ModelOpt calibrates and packs; each quantized shard is written once, as the plan laid it out."""

import contextlib
from pathlib import Path
from typing import Any

import numpy as np

from assemble.plan import AssemblyPlan, PlannedShard
from assemble.writer import ShardWriter, sha256_file
from quantize import ptq
from quantize.console import Reporter, output_to
from quantize.machine import find_gpu
from quantize.model import load_model
from quantize.planning import modelopt_table
from quantize.stage import Context, Result
from quantize.stages import calibrate
from quantize.stages.plan import planned


def run(context: Context) -> Result:
    """Writes the quantized shards.

    Raises:
        CoverageError: ModelOpt quantized other modules than planned.
    """
    plan = planned(context, context.records["fetch"])
    device = str(context.records["plan"].facts["device"])
    rows = np.load(context.directory_of("calibrate") / calibrate.FILE)
    reporter = context.reporter
    with output_to(context.directory / "log.txt"), _gpu_peak(device) as gpu:
        model = load_model(plan.source.root, plan.architecture, device, reporter)
        with reporter.task("calibrate", len(rows)) as progress:
            recipe = modelopt_table(context.recipe, plan.architecture).name
            ptq.calibrate_and_quantize(model, recipe, rows, context.recipe.calibration.batch_size, progress)
        ptq.check_coverage(model, plan.architecture, plan.schemes)
        _write_shards(model, plan, context.directory, reporter)
    shards = [shard for shard in plan.shards if shard.quantized]
    with reporter.task("hash", sum(s.nbytes for s in shards)) as progress:
        outputs = {shard.name: sha256_file(context.directory / shard.name, progress) for shard in shards}
    return Result(outputs, {"device": device, **gpu})


def _write_shards(model: Any, plan: AssemblyPlan, directory: Path, reporter: Reporter) -> None:
    """Exports module by module into the shards that are open; a shard is committed as soon as it is whole."""
    home = {t.name: shard for shard in plan.shards if shard.quantized for t in shard.tensors}
    specs = {t.name: t for shard in plan.shards if shard.quantized for t in shard.tensors}
    open_shards: dict[PlannedShard, ShardWriter] = {}
    with contextlib.ExitStack() as stack, reporter.task("export", sum(t.nbytes for t in specs.values())) as progress:
        for module, tensors in ptq.export_modules(model, plan.architecture, set(plan.schemes)):
            for name, tensor in tensors.items():
                _check(name, tensor, specs[name].dtype, specs[name].shape)
                shard = home[name]
                if shard not in open_shards:
                    open_shards[shard] = ShardWriter(directory / shard.name, shard.tensors)
                    stack.callback(open_shards[shard].abandon)
                open_shards[shard].write(name, ptq.tensor_bytes(tensor))
                progress(specs[name].nbytes)
            shard = home[f"{module}.weight"]
            if open_shards[shard].complete:
                open_shards[shard].commit()
    if unfinished := [s.name for s in plan.shards if s.quantized and not (directory / s.name).exists()]:
        raise ptq.CoverageError(f"the model did not yield every planned module: {unfinished[0]} is incomplete")


def _check(name: str, tensor: Any, dtype: str, shape: tuple[int, ...]) -> None:
    kinds = {"U8": "torch.uint8", "F8_E4M3": "torch.float8_e4m3fn", "F32": "torch.float32"}
    if str(tensor.dtype) != kinds[dtype] or tuple(tensor.shape) != shape:
        raise ptq.CoverageError(f"ModelOpt exported {name} as {tensor.dtype} {tuple(tensor.shape)}, planned {dtype} {shape}")


@contextlib.contextmanager
def _gpu_peak(device: str) -> Any:
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
