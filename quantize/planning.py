"""From a request to an assembly plan. Headers and configs only; no torch; about a second."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from assemble.architecture import LM_HEAD, MTP_PREFIX, TEXT_CLASS, Architecture, experts_container, read_architecture
from assemble.checkpoint import Checkpoint
from assemble.errors import InputError
from assemble.formats import FP8, W4A16_NVFP4
from assemble.plan import AssemblyPlan, plan_assembly
from assemble.sidefiles import check_side_files
from quantize.budget import MachineError
from quantize.modelopt_recipe import ModelOptRecipe, ModelOptRecipeError, read_modelopt_recipe
from quantize.provenance import package_version
from quantize.stage import Request
from recipes.schema import Recipe


def build_plan(recipe: Recipe, source: Checkpoint, head: Checkpoint) -> AssemblyPlan:
    """The assembly plan of a source under a recipe: a pure function of the two.

    Raises:
        InputError: whatever makes the source unfit; see `assemble.plan`, `assemble.architecture`, `assemble.splice`.
    """
    architecture = read_architecture(source.config, source)
    table = modelopt_table(recipe, architecture)
    schemes = _schemes(table, architecture)
    _check_within_reach(table, schemes)
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


def _check_within_reach(table: ModelOptRecipe, schemes: Mapping[str, str]) -> None:
    """Refuses what the engine would meet after the first layers only.

    FP8 needs the input of a module measured, which is done for the decoder's own projections: logits are never computed, and
    an expert sees few tokens or none.

    Raises:
        ModelOptRecipeError: another algorithm than `max` and `mse`, or FP8 for lm_head or for routed experts.
    """
    if table.method not in ("max", "mse"):
        raise ModelOptRecipeError(f"ModelOpt recipe {table.name} calibrates with {table.method}; max and mse can be done.")
    for module, scheme in schemes.items():
        if scheme == FP8 and (module == LM_HEAD or experts_container(module) != module):
            raise ModelOptRecipeError(
                f"ModelOpt recipe {table.name} makes {module} {FP8}; lm_head and routed experts can be {W4A16_NVFP4} or left."
            )


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
        known = "vLLM 0.27.1 and newer know it, 0.22 to 0.26 do not"
        notes.append(f"text-only class {name}: {known}")
    if mtp_from:
        notes.append(f"the MTP head comes from {mtp_from}")
    return notes


def as_json(plan: AssemblyPlan, recipe: Recipe) -> dict[str, Any]:
    """The plan as plain data: what every tensor becomes, and by which of ModelOpt's algorithms."""
    return {
        "algorithm": modelopt_table(recipe, plan.architecture).method,
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
        entry = kinds.get(kind) or kinds.setdefault(kind, {"tensors": 0, "bytes": 0})
        entry["tensors"] += 1
        entry["bytes"] += tensor.nbytes
    return kinds


def _origin(plan: AssemblyPlan, name: str) -> str:
    if name not in plan.copies:
        return "quantized"
    return "copied from the head's checkpoint" if plan.checkpoint_of(name) is not plan.source else "copied"
