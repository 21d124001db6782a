"""From a request to an assembly plan, and to what it will need. Headers and configs only; no torch; about a second."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assemble.architecture import LM_HEAD, MTP_PREFIX, TEXT_CLASS, Architecture, experts_container, read_architecture
from assemble.checkpoint import Checkpoint
from assemble.errors import InputError
from assemble.plan import AssemblyPlan, plan_assembly
from assemble.sidefiles import check_side_files
from quantize.console import size
from quantize.experts import WEIGHTS_AT_ONCE
from quantize.machine import GPU, available_memory_bytes, find_gpu, free_disk_bytes
from quantize.modelopt_recipe import ModelOptRecipe, read_modelopt_recipe
from quantize.provenance import package_version
from quantize.stage import Request
from recipes.schema import Recipe

# Fitted to the runs in docs/measurements.md.
PROCESS_BYTES = 750_000_000  # host memory of a process that imported torch, transformers and ModelOpt
CUDA_PROCESS_BYTES = 3_000_000_000  # the same with a CUDA context
EXPORT_BYTES_PER_WEIGHT = 14  # peak temporaries of ModelOpt's NVFP4 packing, a weight of the module being packed
ACTIVATION_BYTES = 60  # peak of a forward pass, a token and hidden unit (transformers' torch path of Gated DeltaNet)
DISK_MARGIN_BYTES = 50_000_000  # side files, headers, records


class MachineError(InputError):
    """A machine that cannot do what was asked."""


@dataclass(frozen=True)
class Needs:
    """What the run needs against what is there, in bytes. `gpu` is None when it runs on the CPU."""

    device: str
    gpu: GPU | None
    gpu_needed: int
    memory_needed: int
    memory_available: int
    disk_needed: int
    disk_available: int


def build_plan(recipe: Recipe, source: Checkpoint, head: Checkpoint) -> AssemblyPlan:
    """The assembly plan of a source under a recipe: a pure function of the two.

    Raises:
        InputError: whatever makes the source unfit; see `assemble.plan`, `assemble.architecture`, `assemble.splice`.
    """
    architecture = read_architecture(source.config, source)
    table = modelopt_table(recipe, architecture)
    schemes = _schemes(table, architecture)
    plan = plan_assembly(source, head, architecture, schemes, recipe.max_shard_bytes)
    table.check_kv_cache(f"{architecture.prefix}layers.0.self_attn")
    return plan


def _schemes(table: ModelOptRecipe, architecture: Architecture) -> dict[str, str]:
    """What ModelOpt's table makes of each matrix; all experts of a layer have the same, so it is asked for one."""
    schemes: dict[str, str] = {}
    asked: dict[tuple[str, str], str | None] = {}
    for module in architecture.linear_modules:
        key = experts_container(module), module.rpartition(".")[2]
        if key not in asked:
            asked[key] = table.scheme(module)
        if (scheme := asked[key]) is not None:
            schemes[module] = scheme
    return schemes


def modelopt_table(recipe: Recipe, architecture: Architecture) -> ModelOptRecipe:
    """ModelOpt's table for this architecture.

    Raises:
        InputError: the recipe names none for this model type.
    """
    name = {str(k): v for k, v in recipe.modelopt.items()}.get(architecture.model_type)
    if name is None:
        known = ", ".join(recipe.modelopt)
        raise InputError(f"the recipe names no ModelOpt recipe for {architecture.model_type} (it has: {known}).")
    return read_modelopt_recipe(name)


def resolve_device(requested: str, table: ModelOptRecipe) -> tuple[str, GPU | None]:
    """`cuda` when there is a GPU and the CPU was not asked for, else `cpu`.

    Raises:
        MachineError: a GPU asked for and absent; a recipe that ModelOpt runs on CUDA only, on the CPU.
    """
    cpu_build = (package_version("torch") or "").endswith("+cpu")
    gpu = find_gpu() if requested != "cpu" and not cpu_build else None
    if requested == "cuda" and cpu_build:
        raise MachineError(
            "--device cuda: the installed PyTorch is its CPU build. Install the CUDA build, or use --device cpu."
        )
    if requested == "cuda" and gpu is None:
        raise MachineError(
            "--device cuda: no NVIDIA GPU is visible here. Check nvidia-smi and CUDA_VISIBLE_DEVICES, or use cpu."
        )
    if gpu is None and table.needs_cuda:
        raise MachineError(
            f"ModelOpt runs its recipe {table.name} on CUDA only (its MSE sweep is a Triton kernel), and this run would use "
            "the CPU. Use a machine with an NVIDIA GPU, or the recipe without _mse."
        )
    return ("cuda", gpu) if gpu else ("cpu", None)


def estimate_needs(plan: AssemblyPlan, request: Request) -> Needs:
    """Memory, estimated, and disk, exact but for side files."""
    recipe = request.recipe.recipe
    device, gpu = resolve_device(request.device, modelopt_table(recipe, plan.architecture))
    working = _working_bytes(plan, recipe)
    on_gpu = device == "cuda"
    host = CUDA_PROCESS_BYTES + max(t.nbytes for t in plan.source.values()) if on_gpu else PROCESS_BYTES + working
    there = sum(f.stat().st_size for place in (request.workspace, request.out) for f in place.rglob("*.safetensors"))
    return Needs(
        device,
        gpu,
        working if on_gpu else 0,
        host,
        available_memory_bytes(),
        max(0, plan.nbytes + DISK_MARGIN_BYTES - there),
        free_disk_bytes(request.out.absolute().parent),
    )


def body_bytes(plan: AssemblyPlan) -> int:
    """Bytes of the source's tensors that a model holds: all but the MTP head."""
    return sum(t.nbytes for n, t in plan.source.items() if not n.startswith(MTP_PREFIX))


def _working_bytes(plan: AssemblyPlan, recipe: Recipe) -> int:
    """Peak memory of the model's device.

    Either the whole body and a forward pass or the packing of a decoder weight; or, at the end, when the decoder's
    weights are released already, lm_head and its packing.
    """
    linear = {m: rows * columns for m, (rows, columns) in plan.architecture.linear_modules.items() if m in plan.schemes}
    head = linear.pop(LM_HEAD, 0)
    rows = min(recipe.calibration.batch_size, recipe.calibration.num_samples)
    tokens = rows * recipe.calibration.sequence_length
    forward = tokens * int(plan.architecture.text["hidden_size"]) * ACTIVATION_BYTES
    body = body_bytes(plan)
    left = body - 2 * sum(linear.values())
    at_once = WEIGHTS_AT_ONCE if plan.architecture.moe else max(linear.values(), default=0)
    packing, packing_head = (weights * EXPORT_BYTES_PER_WEIGHT for weights in (at_once, head))
    return max(body + max(forward, packing), left + packing_head)


def judge_needs(needs: Needs, weights: int) -> tuple[list[str], list[str]]:
    """What is estimated not to fit (notes), and what cannot fit for certain (problems).

    Args:
        needs: The estimate.
        weights: Bytes of the BF16 weights, which must be resident.

    Returns:
        Notes and problems, a sentence each.
    """
    notes, problems = [], []
    if needs.disk_needed > needs.disk_available:
        problems.append(
            f"not enough disk: {size(needs.disk_needed)} are needed, {size(needs.disk_available)} are free where OUT goes. "
            "Free some, or choose an OUT on another disk."
        )
    what, needed, there = "host memory", needs.memory_needed, needs.memory_available
    if needs.gpu is not None:
        what, needed, there = f"memory of {needs.gpu.name}", needs.gpu_needed, needs.gpu.free_bytes
    if weights > there:
        other = "--device cpu" if needs.gpu else "a machine with more memory"
        problems.append(f"the BF16 weights take {size(weights)}, more than the {size(there)} free {what}. Use {other}.")
    elif needed > there:
        notes.append(f"the run is estimated to need {size(needed)} of {what}, {size(there)} are free: it may run out")
    return notes, problems


def check_paths(request: Request) -> None:
    """Refuses an OUT that would touch the model, or that another thing already is.

    Raises:
        InputError: OUT is or lies in MODEL; OUT exists and no run here made it.
    """
    out, model = request.out.absolute(), Path(request.model)
    if model.exists() and (out.resolve() == model.resolve() or model.resolve() in out.resolve().parents):
        raise InputError(f"OUT {request.out} lies inside MODEL {request.model}, which is never modified. Choose another OUT.")
    if out.exists() and not request.workspace.exists():
        raise InputError(
            f"OUT {request.out} already exists, and no run recorded here made it. Choose another OUT, or remove it."
        )


def versions_note() -> list[str]:
    """Refuses or warns about library versions that are known not to work together."""
    notes = []
    modelopt, transformers = package_version("nvidia-modelopt"), package_version("transformers")
    if package_version("torch") is None or transformers is None:
        raise MachineError(
            "torch and transformers are needed to quantize; in a checkout of this project: "
            "pip install -c constraints.txt '.[quantize]'"
        )
    if modelopt and not modelopt.startswith("0.47."):
        notes.append(f"ModelOpt {modelopt} is installed; this tool was tested with 0.47")
    if tuple(int(p) for p in transformers.split(".")[:2]) >= (5, 15):
        notes.append(f"transformers {transformers} is installed; ModelOpt 0.47 declares support below 5.15")
    return notes


def plan_notes(plan: AssemblyPlan, changes: list[str], mtp_from: str | None) -> list[str]:
    """What the user should know before the run."""
    notes = check_side_files(plan.source.root, plan.architecture) + [f"config.json will be completed: {c}" for c in changes]
    if not plan.architecture.wrapped:
        name = TEXT_CLASS[plan.architecture.model_type]
        known = "vLLM 0.32 and 0.33 know it, 0.22 to 0.26 do not (0.27 to 0.31: not checked)"
        notes.append(f"text-only class {name}: {known}")
    if mtp_from:
        notes.append(f"the MTP head comes from {mtp_from}")
    return notes


def as_json(plan: AssemblyPlan) -> dict[str, Any]:
    """The plan as plain data: what every tensor becomes."""
    return {
        "counts": plan.counts,
        "total_size": plan.nbytes,
        "shards": [{"name": s.name, "bytes": s.nbytes, "quantized": s.quantized} for s in plan.shards],
        "quantized_layers": plan.listed,
        "tensors": {
            t.name: {"dtype": t.dtype, "shape": list(t.shape), "shard": s.name, "from": _origin(plan, t.name)}
            for s in plan.shards
            for t in s.tensors
        },
    }


def sizes(plan: AssemblyPlan) -> dict[str, dict[str, int]]:
    """Tensors and bytes a kind: each scheme, the MTP head, and everything else (BF16, mostly)."""
    kinds: dict[str, dict[str, int]] = {}
    for tensor in (t for shard in plan.shards for t in shard.tensors):
        scheme = plan.schemes.get(tensor.name.rpartition(".")[0])
        kind = scheme or ("MTP head" if tensor.name.startswith(MTP_PREFIX) else "other")
        entry = kinds.setdefault(kind, {"tensors": 0, "bytes": 0})
        entry["tensors"] += 1
        entry["bytes"] += tensor.nbytes
    return kinds


def _origin(plan: AssemblyPlan, name: str) -> str:
    if name not in plan.copies:
        return "quantized"
    return "copied from the head's checkpoint" if plan.checkpoint_of(name) is not plan.source else "copied"
