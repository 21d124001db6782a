"""`card`, `publish`, and `verify --provenance`."""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from assemble.card.make import make_card
from assemble.cli import reported
from assemble.commands.checking import print_report
from assemble.errors import InputError
from assemble.hub import is_hub_id
from assemble.provenance import PROVENANCE, FileFinding, check_files, read_provenance
from assemble.publish.account import check_push
from assemble.publish.errors import RefusedError
from assemble.publish.target import PushTarget

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Root = Annotated[Path, typer.Argument(help="The checkpoint's directory.")]


def card_command(
    checkpoint: Root,
    replace: Annotated[bool, typer.Option("--replace", help="Replace a README.md that someone wrote.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Verify a checkpoint, render its README.md from the records, and record the hash of every file."""
    with reported(debug=debug):
        _check_folder(checkpoint)
        with hashing(checkpoint) as progress:
            made = make_card(checkpoint, progress, replace=replace)
        if as_json:
            told = {"checkpoint": str(checkpoint), "facts_from": made.origin, "changed": made.changed}
            typer.echo(json.dumps({**told, "verified": made.report.as_json()}, indent=2))
        elif made.report.errors:
            print_report(made.report)
            typer.echo("no card was written: a checkpoint that is not fit to serve gets none")
        else:
            state = "written" if made.changed else "is up to date"
            typer.echo(f"{checkpoint / 'README.md'} and {PROVENANCE}: {state}; facts from its {made.origin}")
        raise typer.Exit(1 if made.report.errors else 0)


def publish_command(
    checkpoint: Root,
    repo_id: Annotated[str, typer.Argument(metavar="USER/NAME", help="The repository; made if need be.")],
    branch: Annotated[str, typer.Option(help="Branch to upload to; made if need be.")] = "main",
    pull_request: Annotated[bool, typer.Option("--pull-request", help="Open a pull request instead.")] = False,
    public: Annotated[bool, typer.Option("--public", help="Make a new repository public; it is private otherwise.")] = False,
    replace: Annotated[bool, typer.Option("--replace", help="Replace whatever else lies in the repository.")] = False,
    own_card: Annotated[bool, typer.Option("--own-card", help="Send README.md as it is; you answer for it.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Upload a checkpoint that verifies and is unchanged since, then compare the Hub's hashes with it."""
    from assemble.publish.proof import prove
    from assemble.publish.upload import publish

    with reported(RefusedError, debug=debug):
        target = PushTarget(repo_id, branch, public, pull_request, replace)
        _check_folder(checkpoint)
        say = Console(file=sys.stderr, highlight=False, soft_wrap=True, markup=False).print
        check_push(target, say)
        with hashing(checkpoint) as progress:
            proven = prove(checkpoint, repo_id, progress, own_card=own_card)
        done = publish(proven, target, say)
        if as_json:
            typer.echo(json.dumps(done.as_json(), indent=2))
            return
        for name in done.left:
            typer.echo(f"not sent: {name} (no record names it)")
        seen = "private" if done.private else "public"
        sent = f"{len(done.sent)} of {done.files} files sent" if done.sent else "nothing to send"
        typer.echo(f"{done.url}: {sent}, all {done.files} compared by hash with commit {done.commit} ({done.revision}, {seen})")


def check_provenance(reference: str, revision: str | None) -> dict[str, Any]:
    """Compares every file of a directory, or of a Hub id, with its provenance.json.

    Raises:
        InputError: there is none.
    """
    if is_hub_id(reference):
        from assemble.publish.verify_remote import check_remote

        findings, count = check_remote(reference, revision)
    else:
        root = Path(reference)
        record = read_provenance(root)
        if record is None:
            raise InputError(
                f"{root} has no {PROVENANCE}, so there is nothing to compare with. Check what can be checked without: "
                f"python -m assemble verify {root} --deep"
            )
        with hashing(root) as progress:
            checked = check_files(root, record, progress)
        findings, count = list(checked.findings), len(checked.digests)
    return {"files": count, "findings": [_plain(f) for f in findings], "ok": not any(f.error for f in findings)}


def print_provenance(found: dict[str, Any]) -> None:
    """Prints what `check_provenance` found."""
    for finding in found["findings"]:
        word = "error  " if finding["error"] else "note   "
        typer.echo(f"{word} {finding['kind']:<10} {finding['file']}: {finding['found']}, expected {finding['expected']}")
    verdict = "every one is as recorded" if found["ok"] and not found["findings"] else "see above"
    typer.echo(f"{found['files']} files compared with {PROVENANCE} by SHA-256: {verdict}")


def _plain(finding: FileFinding) -> dict[str, Any]:
    return {
        "kind": finding.kind,
        "file": finding.name,
        "found": finding.found,
        "expected": finding.expected,
        "error": finding.error,
    }


def _check_folder(root: Path) -> None:
    if not root.is_dir():
        raise InputError(f"{root} is not a directory. Give the one that holds config.json and the shards.")


@contextlib.contextmanager
def hashing(root: Path) -> Iterator[Callable[[int], None]]:
    """On a terminal, shows how far the reading of a folder's files is."""
    console = Console(stderr=True)
    total = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"reading {root}", total=total)
        yield lambda nbytes: bar.update(task, advance=nbytes)
