"""`diff`: two checkpoints, side by side."""

import json
from pathlib import Path
from typing import Annotated

import typer

from assemble.cli import reported
from assemble.diff import compare, verdict

SHOWN = 40


def diff_command(
    a: Annotated[Path, typer.Argument(help="One checkpoint's directory.")],
    b: Annotated[Path, typer.Argument(help="The other's.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Compare two checkpoints by meaning: tensors, configs, side files. Exit 1 when they differ."""
    with reported(debug=debug):
        differences = list(compare(a, b))
        if as_json:
            found = [{"kind": d.kind, "where": d.where, "a": d.a, "b": d.b} for d in differences]
            typer.echo(json.dumps({"equal": not differences, "verdict": verdict(differences), "differences": found}, indent=2))
        else:
            for d in differences[:SHOWN]:
                typer.echo(f"{d.kind} {d.where}: {d.a}" + (f" | {d.b}" if d.b else ""))
            if len(differences) > SHOWN:
                typer.echo(f"and {len(differences) - SHOWN} more differences")
            typer.echo(f"{a} and {b}: {verdict(differences)}")
        raise typer.Exit(1 if differences else 0)
