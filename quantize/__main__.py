"""`python -m quantize`: a BF16 Qwen3.5-family checkpoint in, a verified NVFP4 checkpoint with a working MTP head out."""

import contextlib
import json
import os
import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from assemble.cli import reported
from assemble.errors import InputError
from assemble.publish.target import PushTarget
from quantize import console as words
from quantize.bench.command import bench_command
from quantize.evaluate.command import evaluate_command
from quantize.smoke.command import smoke_command
from quantize.stage import Request, SmokeTarget, read_record
from recipes import loader

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)


class Device(StrEnum):
    """Where the model runs."""

    AUTO = "auto"
    CUDA = "cuda"
    CPU = "cpu"


Model = Annotated[str, typer.Argument(help="The BF16 checkpoint: a directory, or a Hub id.")]
Out = Annotated[Path, typer.Argument(help="The directory to make. It appears when it is complete and verified.")]
RecipeOption = Annotated[str, typer.Option("--recipe", help="A shipped recipe's name, or a path that ends in .yaml.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub id.")]
MtpFrom = Annotated[str | None, typer.Option(help="Take the MTP head from this checkpoint, for a model that lost its own.")]
CalibrationOption = Annotated[
    Path | None, typer.Option("--calibration", help="Your own text: .jsonl, .parquet, or a folder saved by `datasets`.")
]
DeviceOption = Annotated[Device, typer.Option("--device", help="auto takes a GPU when there is one.")]
EvaluationData = Annotated[
    Path | None, typer.Option("--evaluation-data", help="Your own text to evaluate on: .jsonl, .parquet, or a saved dataset.")
]
VllmPython = Annotated[Path | None, typer.Option("--vllm-python", help="For --smoke: a Python that has vLLM.")]
VllmImage = Annotated[str | None, typer.Option("--vllm-image", help="For --smoke: a Docker image that has vLLM.")]
VllmEndpoint = Annotated[str | None, typer.Option("--vllm-endpoint", help="For --smoke: a server's URL.")]
VllmTp = Annotated[int, typer.Option("--vllm-tp", min=1, help="For --smoke: number of GPUs.")]
VllmArgs = Annotated[str, typer.Option("--vllm-args", metavar="JSON", help="For --smoke: more engine arguments for vLLM.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


@app.command("run")
def run_command(
    model: Model,
    out: Out,
    recipe: RecipeOption = loader.DEFAULT,
    revision: Revision = None,
    mtp_from: MtpFrom = None,
    calibration: CalibrationOption = None,
    device: DeviceOption = Device.AUTO,
    evaluate: Annotated[bool, typer.Option("--evaluate", help="Measure the result against the BF16 model.")] = False,
    evaluation_data: EvaluationData = None,
    smoke: Annotated[bool, typer.Option("--smoke", help="Serve the result with vLLM and ask it.")] = False,
    vllm_python: VllmPython = None,
    vllm_image: VllmImage = None,
    vllm_endpoint: VllmEndpoint = None,
    vllm_tp: VllmTp = 1,
    vllm_args: VllmArgs = "{}",
    push: Annotated[str | None, typer.Option("--push", metavar="USER/NAME", help="Upload the result to the Hub.")] = None,
    push_branch: Annotated[str, typer.Option(help="Branch to upload to; made if need be.")] = "main",
    push_pull_request: Annotated[bool, typer.Option("--push-pull-request", help="Open a pull request instead.")] = False,
    push_replace: Annotated[bool, typer.Option("--push-replace", help="Replace what else lies in the repository.")] = False,
    public: Annotated[bool, typer.Option("--public", help="Make a new repository public; it is private otherwise.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only plan: the same as the plan command.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Quantize MODEL into OUT. A run that was stopped is continued by the same command."""
    with _reported(debug=debug):
        target = PushTarget(push, push_branch, public, push_pull_request, push_replace) if push else None
        served = SmokeTarget(vllm_python, vllm_image, vllm_endpoint, vllm_tp, vllm_args) if smoke else None
        vllm = (vllm_python, vllm_image, vllm_endpoint, vllm_tp > 1, vllm_args != "{}")
        request = Request(
            model,
            out,
            loader.load(recipe),
            revision,
            mtp_from,
            calibration,
            device.value,
            evaluate,
            evaluation_data,
            served,
            target,
        )
        _check_companions(request, vllm=vllm, public=public or push_pull_request)
        if dry_run:
            _preview(request, as_json=as_json)
        else:
            _run(request, as_json=as_json)


@app.command("plan")
def plan_command(
    model: Model,
    out: Annotated[Path, typer.Argument(help="Where the checkpoint would go (for the disk's free space).")] = Path("out"),
    recipe: RecipeOption = loader.DEFAULT,
    revision: Revision = None,
    mtp_from: MtpFrom = None,
    calibration: CalibrationOption = None,
    device: DeviceOption = Device.AUTO,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Say what every tensor becomes and what the run needs, from headers alone. Writes nothing."""
    with _reported(debug=debug):
        request = Request(model, out, loader.load(recipe), revision, mtp_from, calibration, device.value)
        _preview(request, as_json=as_json)


@app.command("status")
def status_command(out: Out, as_json: Json = False, debug: Debug = False) -> None:
    """Show where the run that makes OUT stands."""
    from quantize.status import read_status

    with _reported(debug=debug):
        status = read_status(out)
        if as_json:
            typer.echo(json.dumps(status, indent=2))
            return
        table = Table("stage", "state", "took", "peak memory", "finished", box=None, pad_edge=False)
        for stage in status["stages"]:
            took = words.duration(stage["seconds"]) if stage["seconds"] is not None else ""
            peak = words.size(stage["peak_memory_bytes"]) if stage["peak_memory_bytes"] else ""
            table.add_row(stage["stage"], stage["state"], took, peak, stage["finished"] or "")
        Console(file=sys.stdout).print(table)
        typer.echo(f"{out}: {'complete' if status['complete'] else 'not complete; run the same command again to continue'}")


@app.command("demo")
def demo_command(
    out: Annotated[Path, typer.Argument(help="The directory to make.")] = Path("out"),
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Run the whole job on the bundled tiny model: offline, without a GPU, in under a minute."""
    from quantize import demo

    with _reported(debug=debug):
        request = Request(str(demo.MODEL), out, loader.load("demo"), calibration=demo.calibration_file(out), device="cpu")
        _run(request, as_json=as_json)


app.command("evaluate")(evaluate_command)
app.command("smoke")(smoke_command)
app.command("bench")(bench_command)


def _reported(*, debug: bool):  # type: ignore[no-untyped-def]
    from quantize.errors import CheckFailedError

    return reported(CheckFailedError, debug=debug)


def _check_companions(request: Request, *, vllm: tuple[object, ...], public: bool) -> None:
    """Refuses an option that without its companion would be passed over in silence."""
    for given, missing, text in (
        (request.evaluation_data, not (request.evaluate or request.smoke), "--evaluation-data is for --evaluate and --smoke"),
        (
            any(vllm),
            request.smoke is None,
            "--vllm-python, --vllm-image, --vllm-endpoint, --vllm-tp and --vllm-args are for --smoke",
        ),
        (public, request.push is None, "--public and --push-pull-request are for --push"),
    ):
        if given and missing:
            raise InputError(f"{text}, which is not given. Give both, or neither.")


def _preview(request: Request, *, as_json: bool) -> None:
    from quantize.budget import MachineError
    from quantize.pipeline import check
    from quantize.preview import preview, print_preview

    shown = preview(request)
    shown.notes.extend(check(request))
    if as_json:
        typer.echo(json.dumps(shown.as_json(), indent=2))
    else:
        print_preview(shown, Console(file=sys.stdout, highlight=False, soft_wrap=True))
    if shown.problems:
        raise MachineError(" ".join(shown.problems))


def _run(request: Request, *, as_json: bool) -> None:
    from quantize import libraries

    gpu = request.device != "cpu" and read_record(request.workspace / "quantize") is None  # else nothing is left to compute
    if gpu:
        libraries.start_gpu()

    from quantize.budget import MachineError
    from quantize.preview import preview
    from quantize.runner import run
    from quantize.streaming import worker
    from quantize.summary import print_summary, summary_json

    if int(os.environ.get("RANK", "0")):  # under torchrun, the first process runs the pipeline
        libraries.start_importing(gpu=gpu)
        libraries.wait_until_imported()
        worker.follow()
        return
    started = time.monotonic()
    reporter = words.Reporter()
    if read_record(request.workspace / "fetch") is None:
        shown = preview(request)
        for note in shown.notes:
            reporter.line(f"note: {note}")
        if shown.problems:
            raise MachineError(shown.problems[0])
    libraries.start_importing(gpu=gpu)
    outcome = run(request, reporter)
    worker.dismiss()
    seconds = time.monotonic() - started
    if as_json:
        typer.echo(json.dumps(summary_json(outcome, seconds), indent=2))
    else:
        print_summary(outcome, seconds, Console(file=sys.stdout, highlight=False, soft_wrap=True))


if __name__ == "__main__":
    try:
        app(prog_name="python -m quantize")
    except SystemExit as end:
        # Everything is on the disk and every thread is done. Python would take apart modules and free memory piece by piece,
        # on a GPU for half a second; the system does it at once.
        for stream in filter(None, (sys.stdout, sys.stderr)):  # a closed one is None
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(end.code if isinstance(end.code, int) else 0 if end.code is None else 1)
