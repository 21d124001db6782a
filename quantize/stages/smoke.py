"""smoke: the checkpoint before a real vLLM, with its own MTP head drafting."""

import json
from pathlib import Path
from typing import Any

from assemble.jsonfile import read_object, write_object
from assemble.writer import sha256_file
from quantize.smoke.command import REPORT, SmokeError
from quantize.smoke.evidence import predicted
from quantize.smoke.launch import TIMEOUT_SECONDS, Container, Interpreter, Place, check_place, here, run_passes
from quantize.smoke.passes import Pass
from quantize.smoke.prompts import bundled_prompts, read_prompts
from quantize.smoke.report import Report
from quantize.smoke.settings import Ask, parse_engine_arguments
from quantize.smoke.verdict import verdict
from quantize.stage import Context, Request, Result, SmokeTarget

PROMPTS = "prompts.jsonl"  # evaluate leaves it: held-out text, and how likely it should be
EVALUATION = "report.json"
ARGUMENTS = "--vllm-args"
OPTIONS = (  # of the `smoke` command, and what `run` calls them
    ("--engine-args", ARGUMENTS),
    ("more GPUs: --tp", "more GPUs: --vllm-tp"),
    ("another --tp", "another --vllm-tp"),
    ("--docker-image", "--vllm-image"),
)


def check(request: Request) -> list[str]:
    """Refuses a vLLM that is not there, before any work.

    Raises:
        InputError: no vLLM here, no such interpreter, no docker; engine arguments that are no JSON object.
    """
    target = request.smoke or SmokeTarget()
    if target.endpoint:
        return [f"smoke: {target.endpoint} must serve the finished checkpoint when the run comes to it"]
    parse_engine_arguments(target.engine, ARGUMENTS)
    check_place(_place(target))
    return []


def run(context: Context) -> Result:
    """Runs and judges; leaves the report, the results and the logs.

    Raises:
        SmokeError: a check failed; the report says which.
    """
    target = context.request.smoke or SmokeTarget()
    engine = parse_engine_arguments(target.engine, ARGUMENTS)
    ask = Ask(context.checkpoint, context.recipe.smoke, _prompts(context), target.tensor_parallel_size, engine=engine)
    passes, reached = _passes(target, ask, context)
    source = context.records.get("fetch")
    report = verdict(
        context.checkpoint,
        passes,
        ask.recipe,
        reached,
        prediction=predicted(_evaluation(context), ask.recipe.num_speculative_tokens, ask.prompts),
        verified=source is not None,  # the verify stage compared it with its source, byte for byte
    )
    write_object(context.directory / REPORT, report.as_json())
    for line in _lines(report):
        context.reporter.line(line)
    if not report.passed:
        raise _error(report, context.directory / REPORT)
    kept = {name: sha256_file(context.directory / name) for name in (REPORT, *_results(context.directory, passes))}
    return Result(kept, _public(report, context.checkpoint))


def _error(report: Report, path: Path) -> SmokeError:
    """The main reason; what a remedy calls the options of the `smoke` command, `run` calls otherwise."""
    first = report.failures[0] if report.failures else None
    text = f"the smoke test failed: {report.reason or 'nothing could be looked at'}. "
    if first is not None:
        text += f"Found {first.found}, expected {first.expected or 'otherwise'}. Do: {first.remedy or 'see the report'}. "
        for theirs, ours in OPTIONS:
            text = text.replace(theirs, ours)
    error = SmokeError(f"{text}All of it: {path}")
    error.summary = report.reason
    return error


def _public(report: Report, checkpoint: Path) -> dict[str, Any]:
    """The facts without the checkpoint's path, which commands in remedies name: they are published."""
    facts: dict[str, Any] = json.loads(json.dumps(report.as_json()).replace(str(checkpoint), "CHECKPOINT"))
    return facts


def _place(target: SmokeTarget) -> Place:
    if target.image:
        return Container(target.image)
    return Interpreter(target.python) if target.python else here()


def _passes(target: SmokeTarget, ask: Ask, context: Context) -> tuple[dict[str, Pass], str]:
    if target.endpoint:
        from quantize.smoke.endpoint import run_endpoint

        return run_endpoint(target.endpoint, ask, context.reporter), "endpoint"
    place = _place(target)
    return run_passes(place, ask, context.directory, TIMEOUT_SECONDS, context.reporter), place.reached


def _prompts(context: Context) -> list[dict[str, Any]]:
    """Evaluate's held-out text where it is there, since its likelihood is predicted; else the user's; else our own."""
    column = context.recipe.calibration.column
    kept = context.directory_of("evaluate") / PROMPTS
    if kept.is_file():
        return read_prompts(kept, column)
    data = context.request.evaluation_data
    if data is not None and data.suffix == ".jsonl":
        return read_prompts(data, column)
    return bundled_prompts()


def _evaluation(context: Context) -> dict[str, Any]:
    record = context.records.get("evaluate")
    if record is None:
        return {}
    report = context.directory_of("evaluate") / EVALUATION
    return read_object(report) if report.is_file() else dict(record.facts)


def _lines(report: Report) -> list[str]:
    return [f"  {check.name}: {check.status}: {check.found}" for check in report.checks]


def _results(directory: Path, passes: dict[str, Pass]) -> list[str]:
    return [f"{name}.json" for name in passes if (directory / f"{name}.json").is_file()]
