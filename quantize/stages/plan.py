"""plan: what every tensor becomes, from headers and configs; refuses what a later stage would choke on."""

from assemble.config import complete_config
from assemble.jsonfile import write_object
from assemble.plan import AssemblyPlan
from assemble.writer import sha256_file
from quantize import calibration
from quantize.budget import MachineError, estimate_needs, judge_needs
from quantize.planning import as_json, build_plan, plan_notes, sizes, versions_note
from quantize.stage import Context, Record, Request, Result
from quantize.stages import fetch

FILE = "plan.json"


def run(context: Context) -> Result:
    """Writes plan.json, and notes what the user should know."""
    source, head = fetch.opened(context.records["fetch"])
    plan = build_plan(context.recipe, source, head)
    notes, problems = examine(plan, context.request, reach=False)
    if problems:
        raise MachineError(problems[0])
    write_object(context.directory / FILE, as_json(plan, context.recipe))
    _, changes = complete_config(source.config, plan.architecture)
    needs = estimate_needs(plan, context.request)
    facts = {
        "counts": plan.counts,
        "total_size": plan.nbytes,
        "sizes": sizes(plan),
        "notes": notes,
        "config_changes": changes,
        "model_type": plan.architecture.model_type,
        "text_only": not plan.architecture.wrapped,
        "device": needs.device,
        "activations": needs.activations,
        "predicted": {"gpu_bytes": needs.gpu_needed, "memory_bytes": needs.memory_needed},
    }
    return Result({FILE: sha256_file(context.directory / FILE)}, facts)


def planned(context: Context, record: Record) -> AssemblyPlan:
    """The plan again, from the fetched files: it is a pure function of them and the recipe."""
    source, head = fetch.opened(record)
    return build_plan(context.recipe, source, head)


def examine(plan: AssemblyPlan, request: Request, *, reach: bool) -> tuple[list[str], list[str]]:
    """Everything that can be known before work starts.

    Args:
        plan: The plan.
        request: What was asked for.
        reach: Also ask the Hub for the calibration dataset.

    Returns:
        Notes (what is worth knowing), and problems (why this machine cannot do it; another one could).

    Raises:
        InputError: an input that would fail later, on any machine.
    """
    _, changes = complete_config(plan.source.config, plan.architecture)
    notes = versions_note() + plan_notes(plan, changes, request.mtp_from)
    settings = request.recipe.recipe.calibration
    if request.calibration:
        calibration.check_path(request.calibration, settings)
    elif reach and (note := calibration.check_reachable(settings)):
        notes.append(note)
    more, problems = judge_needs(estimate_needs(plan, request))
    return notes + more, problems
