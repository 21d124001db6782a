"""`plan` and `run --dry-run`: the plan for people and for programs, before anything is written."""

from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from assemble.plan import AssemblyPlan
from quantize.budget import Needs, estimate_needs
from quantize.console import size
from quantize.planning import as_json, build_plan, check_paths, sizes
from quantize.source import open_headers
from quantize.stage import Request
from quantize.stages.plan import examine

FORMATS = {"W4A16_NVFP4": "NVFP4 W4A16", "FP8": "FP8 W8A8", "MTP head": "MTP head (BF16, copied)", "other": "copied as it is"}

STORES = {"device": "on the GPU", "host": "in host memory", "disk": "in a file"}


@dataclass(frozen=True)
class Preview:
    """A plan with what it needs, what is worth knowing, and why this machine cannot do it (`problems`), if so."""

    request: Request
    plan: AssemblyPlan
    needs: Needs
    notes: list[str]
    problems: list[str]

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "model": self.request.model,
            "notes": self.notes,
            "problems": self.problems,
            "needs": asdict(self.needs),
            **as_json(self.plan, self.request.recipe.recipe),
        }


def preview(request: Request) -> Preview:
    """Plans a request from headers and configs alone; of a Hub id only those are fetched.

    Raises:
        InputError: whatever would make the run fail on any machine.
    """
    check_paths(request)
    source = open_headers(request.model, request.revision)
    head = open_headers(request.mtp_from, None) if request.mtp_from else source
    plan = build_plan(request.recipe.recipe, source, head)
    notes, problems = examine(plan, request, reach=True)
    return Preview(request, plan, estimate_needs(plan, request), notes, problems)


def print_preview(shown: Preview, console: Console) -> None:
    """Prints the plan as tables."""
    plan, needs = shown.plan, shown.needs
    source_bytes = sum(t.nbytes for t in plan.source.values())
    kind = f"Qwen3.5 mixture of {plan.architecture.num_experts} experts" if plan.architecture.moe else "dense Qwen3.5"
    tower = "with a vision tower" if plan.architecture.wrapped else "text only"
    model, layers, recipe = shown.request.model, plan.architecture.num_layers, shown.request.recipe.name
    console.print(f"{model}: {kind}, {layers} layers, {tower}; recipe {recipe}", markup=False)
    table = Table("becomes", "modules", "tensors", "bytes", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for kind, entry in sizes(plan).items():
        modules = plan.counts.get(kind)
        table.add_row(FORMATS[kind], str(modules) if modules else "", str(entry["tensors"]), f"{entry['bytes']:,}")
    tensors = sum(len(s.tensors) for s in plan.shards)
    table.add_row("all", str(len(plan.listed)), str(tensors), f"{plan.nbytes:,}", end_section=True)
    console.print(table)
    share = plan.nbytes / source_bytes
    console.print(f"{size(source_bytes)} -> {size(plan.nbytes)} ({share:.0%}) in {len(plan.shards)} shards", markup=False)
    where = f"{needs.gpu.name} (sm_{needs.gpu.compute_capability.replace('.', '')})" if needs.gpu else "CPU"
    console.print(f"device: {where}; hidden states between layers: {STORES[needs.activations]}", markup=False)
    if needs.gpu:
        console.print(f"GPU memory: about {size(needs.gpu_needed)}, {size(needs.gpu.free_bytes)} free", markup=False)
    console.print(f"host memory: about {size(needs.memory_needed)}, {size(needs.memory_available)} available", markup=False)
    console.print(f"disk: {size(needs.disk_needed)}, {size(needs.disk_available)} free", markup=False)
    for note in shown.notes:
        console.print(f"note: {note}", markup=False)
