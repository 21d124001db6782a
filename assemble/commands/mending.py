"""`splice` and `repair`: what the two commands print, and how they end."""

import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from assemble.architecture import MTP_PREFIX
from assemble.checkpoint import Checkpoint
from assemble.cli import reported
from assemble.commands.checking import print_report
from assemble.errors import InputError
from assemble.mend import swap
from assemble.mend.draft import Note
from assemble.mend.execute import Mended, check_output, execute
from assemble.mend.repairs import REPAIRS, SPLICE, MendPlan, plan_mending
from assemble.verify import verify

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Out = Annotated[Path | None, typer.Option(help="Make the result here, a new directory: hard links and what changes.")]


def splice_command(
    checkpoint: Annotated[Path, typer.Argument(help="The checkpoint that lacks a BF16 MTP head.")],
    head_from: Annotated[Path, typer.Option(help="The checkpoint to take it from: the BF16 base model, say.")],
    out: Out = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Put the BF16 MTP head of another checkpoint in, byte for byte. In place unless --out is given; a right head stays."""
    with reported(debug=debug):
        target = _prepared(checkpoint, out)
        head = Checkpoint.open(head_from)
        plan = plan_mending(checkpoint, SPLICE, head_from=head)
        mended = None if plan.nothing_to_do else _execute(plan, target, head=head)
        if as_json:
            typer.echo(json.dumps(_as_json(plan, mended), indent=2))
        elif mended is None:
            typer.echo(f"{checkpoint}: its MTP head is that of {head_from}, byte for byte (SHA-256). Nothing to do.")
        else:
            _print_notes(plan.mended, "")
            typer.echo(f"{mended.out}: has the MTP head of {head_from}; {_written(plan)}")
            _print_verdict(mended)
        raise typer.Exit(1 if mended is not None and mended.report.errors else 0)


def repair_command(
    checkpoint: Annotated[Path, typer.Argument(help="The checkpoint to mend.")],
    source: Annotated[
        Path | None, typer.Option(help="The BF16 checkpoint it was made from. Much more can be mended with it.")
    ] = None,
    head_from: Annotated[Path | None, typer.Option(help="Where to take the MTP head from, when not from the source.")] = None,
    out: Out = None,
    in_place: Annotated[
        bool, typer.Option("--in-place", help="Replace the checkpoint, in one step; the old JSON files stay.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and write nothing.")] = False,
    unlist: Annotated[
        bool,
        typer.Option("--unlist", help="Unlist a module that is listed as quantized and stored BF16, instead of quantizing it."),
    ] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Mend what can be mended without a model. Exit 1 when something stays broken."""
    with reported(debug=debug):
        if sum((out is not None, in_place, dry_run)) != 1:
            raise InputError(
                "Say where the mended checkpoint is to go: --out NEW, --in-place, or --dry-run to see the plan only."
            )
        target = _prepared(checkpoint, out)
        origin = Checkpoint.open(source) if source else None
        head = Checkpoint.open(head_from) if head_from else None
        plan = plan_mending(checkpoint, REPAIRS, source=origin, head_from=head, unlist=unlist)
        if not as_json:
            _print_plan(plan)
            if out is not None and plan.nothing_to_do:
                typer.echo(f"{out} was not made.")
        mended: Mended | None
        if plan.nothing_to_do:
            mended = Mended(None, (), verify(checkpoint, source=origin, head=head))
        else:
            mended = None if dry_run else _execute(plan, target, source=origin, head=head)
        if as_json:
            typer.echo(json.dumps(_as_json(plan, mended), indent=2))
        elif mended is not None:
            if mended.out:
                typer.echo(f"{mended.out}: mended; {_written(plan)}")
            _print_verdict(mended)
        raise typer.Exit(1 if plan.unmended or (mended is not None and mended.report.errors) else 0)


def _prepared(checkpoint: Path, out: Path | None) -> Path:
    """Recovers from a killed command, and checks that the result can be put where it is to go."""
    swap.recover(checkpoint.parent.resolve() / checkpoint.name)
    if not checkpoint.is_dir():
        raise InputError(f"{checkpoint} is not a directory. Give the directory that holds config.json and the shards.")
    target = check_output(checkpoint, out)
    swap.recover(target)
    return target


def _execute(plan: MendPlan, target: Path, *, source: Checkpoint | None = None, head: Checkpoint | None = None) -> Mended:
    with swap.exclusively(target):
        return execute(plan, target, source=source, head=head)


def _print_plan(plan: MendPlan) -> None:
    root = plan.found.root
    if plan.mended:
        typer.echo(f"{root}: {len(plan.mended)} faults to mend; {_written(plan)}")
        _print_notes(plan.mended, "-> ")
    if plan.unmended:
        typer.echo(f"{root}: {len(plan.unmended)} faults that cannot be mended here")
        _print_notes(plan.unmended, "needs ")
    if not plan.mended and not plan.unmended:
        typer.echo(f"{root}: nothing to mend.")


def _print_notes(notes: Iterable[Note], arrow: str) -> None:
    """One line a kind of fault: names that differ in numbers only are counted, and so are all tensors of the head."""
    first: dict[tuple[str, ...], Note] = {}
    counts: Counter[tuple[str, ...]] = Counter()
    for note in notes:
        where = "" if note.where.startswith(MTP_PREFIX) else note.where
        key = (note.repair, *(re.sub(r"\d+", "#", text) for text in (where, note.found, note.remedy)))
        first.setdefault(key, note)
        counts[key] += 1
    for key, note in first.items():
        more = f" (and {counts[key] - 1} like it)" if counts[key] > 1 else ""
        typer.echo(f"  {note.repair}: {note.where}{more}: {note.found} {arrow or '-> '}{note.remedy}")


def _print_verdict(mended: Mended) -> None:
    for text in mended.statements:
        typer.echo(f"  {text}")
    print_report(mended.report)


def _written(plan: MendPlan) -> str:
    written = [s for s in plan.shards if s.link is None]
    if not written:
        return "no shard is written"
    return (
        f"{len(written)} of {len(plan.shards)} shards are written ({plan.bytes_to_write / 1e9:.3f} GB), the others are linked"
    )


def _as_json(plan: MendPlan, mended: Mended | None) -> dict[str, Any]:
    return {
        "checkpoint": str(plan.found.root),
        "nothing_to_do": plan.nothing_to_do,
        "mended": [_note(n) for n in plan.mended],
        "unmended": [_note(n) for n in plan.unmended],
        "shards": [{"name": s.name, "linked_from": s.link, "bytes": s.nbytes} for s in plan.shards],
        "bytes_to_write": plan.bytes_to_write,
        "out": str(mended.out) if mended and mended.out else None,
        "statements": list(mended.statements) if mended else [],
        "verified": mended.report.as_json() if mended else None,
    }


def _note(note: Note) -> dict[str, str]:
    return {"repair": note.repair, "where": note.where, "found": note.found, "remedy": note.remedy}
