"""`verify` and `rules`: a checkpoint against the law book, and the book itself."""

import json
from pathlib import Path
from typing import Annotated

import typer

from assemble.cli import reported
from assemble.commands.checking import book, markdown, print_book, print_report
from assemble.commands.examining import examine
from assemble.commands.publishing import check_provenance, print_provenance
from assemble.vllm_load import VllmCrashError

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def verify_command(
    checkpoint: Annotated[str, typer.Argument(help="The checkpoint's directory, or a Hub id.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub id.")] = None,
    source: Annotated[
        Path | None, typer.Option(help="The BF16 checkpoint it was made from: adds identity, byte for byte.")
    ] = None,
    head: Annotated[Path | None, typer.Option(help="Where its MTP head came from, when not from the source.")] = None,
    deep: Annotated[bool, typer.Option("--deep", help="Also read the values of all tensors.")] = False,
    require_mtp: Annotated[bool, typer.Option("--require-mtp", help="Make the absence of an MTP head an error.")] = False,
    tp: Annotated[int, typer.Option("--tp", min=1, help="Number of GPUs it is to be split over.")] = 1,
    with_vllm: Annotated[
        Path | None,
        typer.Option("--with-vllm", metavar="PYTHON", help="Also load it with the vLLM of this interpreter (make vllm-env)."),
    ] = None,
    provenance: Annotated[
        bool, typer.Option("--provenance", help="Also hash every file and compare it with provenance.json.")
    ] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Check a quantized checkpoint against the law book. Exit 1 when it breaks a rule."""
    with reported(VllmCrashError, debug=debug):
        found = examine(
            checkpoint,
            revision,
            source=source,
            head=head,
            deep=deep,
            with_vllm=with_vllm,
            tensor_parallel=tp,
            require_mtp=require_mtp,
        )
        files = check_provenance(checkpoint, revision) if provenance else None
        if as_json:
            typer.echo(json.dumps(found.as_json() | ({"provenance": files} if files else {}), indent=2))
        else:
            print_report(found.report)
            for note in found.notes:
                typer.echo(note)
            if files:
                print_provenance(files)
        raise typer.Exit(1 if found.report.errors or (files and not files["ok"]) else 0)


def rules_command(
    as_json: Json = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print docs/law-book.md.")] = False,
) -> None:
    """Print the law book."""
    if as_json:
        typer.echo(json.dumps(book(), indent=2))
    elif as_markdown:
        typer.echo(markdown(), nl=False)
    else:
        print_book()
