"""`python -m quantize evaluate`."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from assemble.cli import reported
from assemble.errors import InputError
from quantize.console import Reporter
from quantize.errors import CheckFailedError
from quantize.evaluate.tasks import command as benchmarks
from recipes import loader

WIDTH = 140  # characters, where there is no terminal that has a width

Checkpoints = Annotated[
    list[str] | None,
    typer.Argument(help="Written checkpoints, directories or Hub ids; several are compared.", show_default=False),
]
Source = Annotated[
    str | None, typer.Option("--source", help="The BF16 checkpoint they were made of: a directory, or a Hub id.")
]
Data = Annotated[
    Path | None,
    typer.Option("--data", help="Held-out text: .jsonl, .parquet, or a folder saved by `datasets`. Else the recipe's dataset."),
]
Out = Annotated[
    Path | None, typer.Option("--out", help="Where the report goes. By default CHECKPOINT.evaluation.", show_default=False)
]


def evaluate_command(
    checkpoints: Checkpoints = None,
    source: Source = None,
    data: Data = None,
    out: Out = None,
    rows: Annotated[
        int | None, typer.Option(min=1, help="Documents. By default the recipe says, 64.", show_default=False)
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=16, help="Tokens of each, at most. By default the recipe says, 512.", show_default=False)
    ] = None,
    recipe: Annotated[
        str, typer.Option(help="The recipe whose `evaluation` says what to ask for, limits included.")
    ] = loader.DEFAULT,
    mtp_from: Annotated[
        str | None, typer.Option(help="The checkpoint that the MTP head was taken from, if not the source.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto takes a GPU when there is one; cuda; cpu.")] = "auto",
    mtp: Annotated[
        bool | None,
        typer.Option(
            "--mtp/--no-mtp", help="Measure the MTP head. By default when the model fits in memory.", show_default=False
        ),
    ] = None,
    cast_head: Annotated[list[str] | None, typer.Option(help="Also try the head rounded to FP8 or NVFP4. Repeatable.")] = None,
    draft_cost: Annotated[float | None, typer.Option(min=0, help="What a draft costs beside a pass of the body.")] = None,
    verify_cost: Annotated[float | None, typer.Option(min=0, help="What one more token in a pass of the body costs.")] = None,
    endpoint: benchmarks.Endpoint = None,
    tasks: benchmarks.Tasks = None,
    problems: benchmarks.Problems = None,
    model: benchmarks.Model = None,
    tokenizer: benchmarks.Tokenizer = None,
    chat: benchmarks.Chat = False,
    task_folder: benchmarks.TaskFolder = None,
    num_fewshot: benchmarks.NumFewshot = None,
    limit: benchmarks.Limit = None,
    concurrency: benchmarks.Concurrency = 1,
    temperature: benchmarks.Temperature = None,
    top_p: benchmarks.TopP = None,
    top_k: benchmarks.TopK = None,
    max_tokens: benchmarks.MaxTokens = None,
    thinking: benchmarks.Thinking = True,
    timeout: benchmarks.Timeout = benchmarks.TIMEOUT_SECONDS,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Measure written checkpoints against their BF16 source: predictions, weights, layers, and the MTP head's drafts.

    With --endpoint, run benchmarks against a served one instead.
    """
    with reported(CheckFailedError, debug=debug):
        if endpoint is not None:
            _check_served(checkpoints, source)
            benchmarks.run_tasks(
                endpoint,
                tasks or [],
                out=out or benchmarks.OUT,
                model=model,
                problems=problems,
                tokenizer=tokenizer,
                chat=chat,
                task_folder=task_folder,
                num_fewshot=num_fewshot,
                limit=limit,
                concurrency=concurrency,
                temperature=temperature,
                top_p=top_p,
                top_k=top_k,
                max_tokens=max_tokens,
                thinking=thinking,
                timeout_seconds=timeout,
                as_json=as_json,
            )
            return
        if not checkpoints or source is None or tasks:
            raise InputError(
                "--tasks is for a server: give its --endpoint."
                if tasks
                else "give a CHECKPOINT, and with --source the BF16 checkpoint that it was made of: "
                "python -m quantize evaluate OUT --source MODEL --data held-out.jsonl"
            )
        from quantize.evaluate import gates
        from quantize.evaluate.asked import Asked, run
        from quantize.evaluate.evaluation import Drafting

        chosen = loader.load(recipe).recipe
        limits = {name: value for name, value in (("rows", rows), ("tokens", tokens)) if value is not None}
        settings = chosen.evaluation.model_copy(update=limits)
        drafting = Drafting(mtp, _formats(cast_head or []), draft_cost, verify_cost)
        asked = Asked(checkpoints, source, mtp_from, data, out, settings, chosen.calibration, drafting, device)
        finished = run(asked, Reporter())
        if as_json:
            typer.echo(json.dumps(finished.as_json(), indent=2))
        else:
            width = None if sys.stdout.isatty() else WIDTH
            finished.show(Console(file=sys.stdout, highlight=False, soft_wrap=True, width=width))
        for report, folder in zip(finished.reports, finished.folders, strict=True):
            gates.check(list(report.gates), str(folder / "report.md"))


def _check_served(checkpoints: list[str] | None, source: str | None) -> None:
    if checkpoints or source:
        raise InputError(
            "--endpoint benchmarks what a server serves; CHECKPOINT and --source are for measuring files. Give either."
        )


def _formats(names: list[str]) -> list[str]:
    """The formats to round the head to, as they are spelled elsewhere.

    Raises:
        InputError: another word.
    """
    known = ("FP8", "NVFP4")
    formats = [part.strip().upper() for name in names for part in name.split(",")]
    for name in formats:
        if name not in known:
            raise InputError(f"--cast-head {name}: the head can be rounded to {' or '.join(known)}.")
    return formats
