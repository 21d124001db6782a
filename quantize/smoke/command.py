"""`python -m quantize smoke`: a checkpoint before a real vLLM."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from assemble.cli import reported
from assemble.errors import InputError
from assemble.jsonfile import read_object, write_object
from quantize.console import Reporter
from quantize.errors import CheckFailedError
from recipes import loader

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
REPORT = "report.json"


class SmokeError(CheckFailedError):
    """A checkpoint that does not do before vLLM what it should."""


def smoke_command(
    checkpoint: Annotated[Path, typer.Argument(help="The checkpoint's directory.")],
    vllm_python: Annotated[
        Path | None, typer.Option("--vllm-python", metavar="PYTHON", help="The Python of an environment that has vLLM.")
    ] = None,
    docker: Annotated[bool, typer.Option("--docker", help="Run vLLM in its official container.")] = False,
    docker_image: Annotated[
        str | None, typer.Option("--docker-image", metavar="IMAGE", help="Run it in this container.")
    ] = None,
    endpoint: Annotated[
        str | None, typer.Option("--endpoint", metavar="URL", help="Ask a vLLM server that runs already.")
    ] = None,
    plain_endpoint: Annotated[
        str | None,
        typer.Option(
            "--plain-endpoint", metavar="URL", help="With --endpoint: the same checkpoint, served without speculation."
        ),
    ] = None,
    prepare: Annotated[
        Path | None, typer.Option("--prepare", metavar="DIR", help="Only write what another machine needs to run the test.")
    ] = None,
    result: Annotated[
        list[Path] | None, typer.Option("--result", metavar="PATH", help="Judge results that the runner wrote elsewhere.")
    ] = None,
    source: Annotated[
        Path | None, typer.Option(help="The BF16 checkpoint it was made from: the law book then compares bytes.")
    ] = None,
    head: Annotated[Path | None, typer.Option(help="Where its MTP head came from, when not from the source.")] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="JSON lines: text, messages or prompt_token_ids; sixteen of our own otherwise.")
    ] = None,
    prediction: Annotated[Path | None, typer.Option(help="The report.json of `evaluate`: what acceptance should be.")] = None,
    recipe: Annotated[str, typer.Option("--recipe", help="The recipe whose limits hold.")] = loader.DEFAULT,
    tp: Annotated[int, typer.Option("--tp", min=1, help="Number of GPUs.")] = 1,
    cuda_graphs: Annotated[bool, typer.Option("--cuda-graphs", help="A third pass, with compilation and CUDA graphs.")] = False,
    engine_args: Annotated[str, typer.Option("--engine-args", metavar="JSON", help="More engine arguments for vLLM.")] = "{}",
    timeout: Annotated[float, typer.Option("--timeout", min=1, help="Seconds for a pass.")] = 1800.0,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Where results and logs go (CHECKPOINT.smoke).")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Load CHECKPOINT in a real vLLM, generate with and without its MTP head, and judge what happened. Exit 1 when it fails."""
    with reported(CheckFailedError, debug=debug):
        from quantize.smoke.prompts import bundled_prompts, read_prompts
        from quantize.smoke.settings import Ask, parse_engine_arguments

        _check_ways(vllm_python, docker, docker_image, endpoint, prepare, result, plain_endpoint)
        limits = loader.load(recipe).recipe
        asked = read_prompts(prompts, limits.calibration.column) if prompts else bundled_prompts()
        ask = Ask(checkpoint, limits.smoke, asked, tp, cuda_graphs, parse_engine_arguments(engine_args))
        folder = out or checkpoint.absolute().with_name(checkpoint.absolute().name + ".smoke")
        if prepare is not None:
            _prepare(ask, prepare)
            return
        passes, reached = _run(ask, folder, timeout, vllm_python, docker_image, endpoint, plain_endpoint, result, docker=docker)
        report = _judge(ask, passes, reached, source, head, prediction)
        if not result:
            folder.mkdir(parents=True, exist_ok=True)
            write_object(folder / REPORT, report.as_json())
        _print(report, checkpoint, None if result else folder, as_json=as_json)
        if not report.passed:
            raise typer.Exit(1)


def _check_ways(*ways: Any) -> None:
    python, docker, image, endpoint, prepare, result, plain = ways
    names = ("--vllm-python", "--docker", "--endpoint", "--prepare", "--result")
    given = [name for name, way in zip(names, (python, docker or image, endpoint, prepare, result), strict=True) if way]
    if len(given) > 1:
        raise InputError(f"{' and '.join(given)} exclude each other. Give one of them.")
    if plain and not endpoint:
        raise InputError("--plain-endpoint goes with --endpoint: the same checkpoint, served with and without speculation.")


def _run(
    ask: Any,
    folder: Path,
    timeout: float,
    python: Path | None,
    image: str | None,
    endpoint: str | None,
    plain_endpoint: str | None,
    result: list[Path] | None,
    *,
    docker: bool,
) -> tuple[Mapping[str, Any], str]:
    from quantize.smoke.endpoint import run_endpoint
    from quantize.smoke.evidence import read_expectation
    from quantize.smoke.launch import Container, Interpreter, check_place, here, run_passes
    from quantize.smoke.verdict import read_results
    from recipes.vllm_release import IMAGE

    read_expectation(ask.checkpoint)
    reporter = Reporter()
    if result:
        return read_results(result), "results"
    if endpoint:
        return run_endpoint(endpoint, ask, reporter, plain_endpoint), "endpoint"
    place = Container(image or IMAGE) if docker or image else Interpreter(python) if python else here()
    check_place(place)
    return run_passes(place, ask, folder, timeout, reporter), place.reached


def _judge(
    ask: Any, passes: Mapping[str, Any], reached: str, source: Path | None, head: Path | None, prediction: Path | None
) -> Any:
    from quantize.smoke.evidence import predicted
    from quantize.smoke.verdict import verdict

    facts = read_object(prediction) if prediction else {}
    expected = predicted(facts, ask.recipe.num_speculative_tokens, ask.prompts)
    return verdict(ask.checkpoint, passes, ask.recipe, reached, source=source, head=head, prediction=expected)


def _prepare(ask: Any, folder: Path) -> None:
    from quantize.smoke.evidence import read_expectation
    from quantize.smoke.launch import prepare

    read_expectation(ask.checkpoint)
    *there, here = prepare(ask, folder)
    typer.echo(f"{folder}: copy it, and the checkpoint, to the machine that has vLLM, and run there, in that folder:")
    for line in there:
        typer.echo(f"  {line}")
    typer.echo(f"then bring the folder back, and judge:\n  {here}")


def _print(report: Any, checkpoint: Path, folder: Path | None, *, as_json: bool) -> None:
    from quantize.smoke.report import print_report

    if as_json:
        typer.echo(json.dumps(report.as_json(), indent=2))
        return
    print_report(report, Console(file=sys.stdout, highlight=False, soft_wrap=True))
    outcome = "passes" if report.passed else "was CUT SHORT in" if report.cut_short else "FAILS"
    kept = f" (logs and report: {folder})" if folder else ""
    typer.echo(f"\n{checkpoint}: {outcome} the smoke test{kept}")
    if report.failures:
        typer.echo(f"  {report.reason}" + (f"\n  do: {report.failures[0].remedy}" if report.failures[0].remedy else ""))
