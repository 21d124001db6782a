"""`python -m assemble`: checks checkpoints, without a GPU and without loading a model."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from assemble.checkpoint import Checkpoint
from assemble.cli import reported
from assemble.errors import InputError
from assemble.rules import RULES
from assemble.verify import Report, verify

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


@app.command("verify")
def verify_command(
    checkpoint: Annotated[Path, typer.Argument(help="The checkpoint's directory.")],
    source: Annotated[Path | None, typer.Option(help="The BF16 checkpoint it was made from: adds identity by hash.")] = None,
    head: Annotated[Path | None, typer.Option(help="Where its MTP head came from, when not from the source.")] = None,
    deep: Annotated[bool, typer.Option("--deep", help="Also read the values of the scales.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Check a quantized checkpoint against the law book. Exit 1 when it breaks a rule."""
    with reported(debug=debug):
        if not checkpoint.is_dir():
            raise InputError(f"{checkpoint} is not a directory. Give the directory that holds config.json and the shards.")
        report = verify(
            checkpoint,
            source=Checkpoint.open(source) if source else None,
            head=Checkpoint.open(head) if head else None,
            deep=deep,
        )
        if as_json:
            typer.echo(json.dumps(report.as_json(), indent=2))
        else:
            _print_report(report)
        raise typer.Exit(1 if report.errors else 0)


@app.command("rules")
def rules_command(as_json: Json = False) -> None:
    """Print the law book."""
    if as_json:
        rules = [
            {"id": r.id, "severity": r.severity.value, "needs": r.needs.value, "why": r.why, "source": r.source} for r in RULES
        ]
        typer.echo(json.dumps(rules, indent=2))
        return
    table = Table("rule", "severity", "what goes wrong when it is broken", "source", box=None)
    for rule in RULES:
        table.add_row(rule.id, rule.severity.value, rule.why, rule.source)
    Console(file=sys.stdout).print(table)


def _print_report(report: Report) -> None:
    shown = 20
    for finding in report.findings[:shown]:
        text = f"{finding.severity.value} {finding.rule}: {finding.where}: found {finding.found}, expected {finding.expected}"
        typer.echo(text)
    if len(report.findings) > shown:
        typer.echo(f"and {len(report.findings) - shown} more findings")
    if report.errors:
        typer.echo(f"{report.root}: {len(report.errors)} errors ({len(report.rules)} rules applied)")
    else:
        typer.echo(f"{report.root}: sound ({len(report.rules)} rules applied, {len(report.findings)} warnings)")


if __name__ == "__main__":
    app(prog_name="python -m assemble")
