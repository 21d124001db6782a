"""`python -m quantize bench`: how fast a running server is, and at which concurrency it stops getting faster."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from assemble.cli import reported
from assemble.errors import InputError
from assemble.jsonfile import write_object
from quantize.console import Reporter
from quantize.errors import CheckFailedError

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def bench_command(
    endpoint: Annotated[str, typer.Option("--endpoint", metavar="URL", help="The vLLM server, such as http://127.0.0.1:8000.")],
    prompts: Annotated[
        Path | None, typer.Option(help='JSON lines: {"category": ..., "prompt": ...}; sixteen of our own otherwise.')
    ] = None,
    concurrency: Annotated[str, typer.Option(help="Requests at once, one value a level.")] = "1,2,4,6,8",
    output_tokens: Annotated[int, typer.Option(min=2, help="Tokens generated a request.")] = 256,
    warmups: Annotated[int, typer.Option(min=0, help="Requests before the clock starts, a cell.")] = 8,
    tokenizer: Annotated[
        str | None, typer.Option(help="The checkpoint whose tokenizer counts; else the name that the server gives its model.")
    ] = None,
    thinking: Annotated[bool, typer.Option("--thinking", help="Let the chat template turn thinking on.")] = False,
    vllm_python: Annotated[
        Path | None, typer.Option("--vllm-python", metavar="PYTHON", help="The Python that has vLLM; else `vllm` on the PATH.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where results, tables and the plot go.")] = Path("bench"),
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure a server with `vllm bench serve`, over concurrencies and categories of prompts."""
    with reported(CheckFailedError, debug=debug):
        from quantize.bench import report
        from quantize.bench.drive import Load, measure, vllm_command
        from quantize.bench.prompts import BUNDLED, read_categories

        levels = _levels(concurrency)
        url = endpoint.rstrip("/").removesuffix("/v1")
        load = Load(url, vllm_command(vllm_python), output_tokens, warmups, tokenizer, thinking)
        cells = measure(load, read_categories(prompts or BUNDLED), levels, out, Reporter())
        write_object(out / "report.json", report.as_json(cells, output_tokens))
        (out / "report.md").write_text(report.markdown(cells, output_tokens), encoding="utf-8")
        report.plot(cells, out / "bench.png")
        if as_json:
            typer.echo(json.dumps(report.as_json(cells, output_tokens), indent=2))
            return
        report.print_report(cells, output_tokens, Console(file=sys.stdout, highlight=False, soft_wrap=True))
        typer.echo(f"\ntables: {out / 'report.md'}; plot: {out / 'bench.png'}; vLLM's own results: {out}/*.json")


def _levels(text: str) -> list[int]:
    try:
        levels = sorted({int(part) for part in text.split(",")})
    except ValueError as error:
        raise InputError(f"--concurrency {text!r} is not a list of numbers. Give one such as 1,2,4,8.") from error
    if levels[0] < 1:
        raise InputError(f"--concurrency {text!r} holds a number below 1.")
    return levels
