"""evaluate: the written checkpoint against its source, on held-out text; the recipe's limits are judged."""

from typing import Any

from assemble.writer import sha256_file
from quantize import calibration
from quantize.console import output_to
from quantize.evaluate import gates
from quantize.evaluate.evaluation import (
    ACCEPTANCE_PLOT,
    JSON,
    KL_PLOT,
    LAYER_PLOT,
    Drafting,
    evaluate,
    held_out,
    open_subject,
    resolve_device,
    write_report,
)
from quantize.stage import Context, Request, Result
from quantize.stages import fetch
from quantize.stages.calibrate import FILE as ROWS


def check(request: Request) -> list[str]:
    """Refuses held-out text that cannot be read, before any work.

    Raises:
        InputError: unreadable, or what was calibrated on itself.
    """
    base, path = request.recipe.recipe.calibration, request.evaluation_data
    if path is not None:
        calibration.check_path(path, base)
    return []


def run(context: Context) -> Result:
    """Writes the report's files.

    Raises:
        GateError: a limit of the recipe is not kept; the report is written all the same.
    """
    source, head = fetch.opened(context.records["fetch"])
    model, settings = context.records["fetch"].facts["model"], context.recipe.evaluation
    subject = open_subject(context.checkpoint, source.root, head.root, context.request.out.name, str(model["name"]))
    with output_to(context.directory / "log.txt"):
        rows = held_out(
            subject,
            context.request.evaluation_data,
            settings,
            context.recipe.calibration,
            [context.directory_of("calibrate") / ROWS],
        )
        report = evaluate(subject, rows, settings, Drafting(), resolve_device(context.request.device), context.reporter)
    names = write_report(report, context.directory)
    gates.check(list(report.gates), str(context.directory / JSON))
    facts: dict[str, Any] = report.facts() | {"publish": [n for n in names if n in (LAYER_PLOT, KL_PLOT, ACCEPTANCE_PLOT)]}
    return Result({name: sha256_file(context.directory / name) for name in names}, facts)
