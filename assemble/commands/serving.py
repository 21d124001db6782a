"""`serve` and `profiles`: the command for a checkpoint, and the ways of serving that there are."""

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from assemble.cli import reported
from assemble.errors import InputError
from assemble.fit.report import PIPE_WIDTH
from assemble.hub import HubMirror, opened
from assemble.serve.adapter import check_adapter
from assemble.serve.command import MARK, PORT, Command, Place, docker_command, script, vllm_command
from assemble.serve.deciding import RefusedError, Serving, Wish, decide
from assemble.serve.described import Described, describe
from assemble.serve.launch import LaunchError, installed_vllm, launch
from assemble.serve.page import condition_text, flag_text, profile_page, whole_page
from recipes.serve_profiles import load_profile, shipped_profiles

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def serve_command(
    checkpoint: Annotated[str, typer.Argument(help="The checkpoint's directory, or a Hub id.")],
    vllm_arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- VLLM_ARGUMENTS]", help="After --: more arguments of vllm serve, in the profile's place."),
    ] = None,
    profile: Annotated[str | None, typer.Option(help="A shipped profile, or your own .yaml. Without it: which fit.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub id.")] = None,
    vllm: Annotated[str | None, typer.Option(help="vLLM's version, for what differs. The profile's by default.")] = None,
    gpus: Annotated[str | None, typer.Option(help="Your cards in place of the profile's, such as 2x24GB.")] = None,
    context: Annotated[int | None, typer.Option(min=1, help="Tokens of the longest request in place of what fits.")] = None,
    mtp: Annotated[
        int | None, typer.Option(min=0, max=16, help="Tokens drafted a step; 0 is off. The profile's by default.")
    ] = None,
    lora: Annotated[list[str] | None, typer.Option(metavar="NAME=DIR", help="A LoRA adapter; may be repeated.")] = None,
    no_lora: Annotated[bool, typer.Option("--no-lora", help="Set no memory aside for adapters.")] = False,
    name: Annotated[str | None, typer.Option(help="What clients call the model; by default the checkpoint's name.")] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="The port to listen on.")] = PORT,
    docker: Annotated[bool, typer.Option("--docker", help="A docker run line of vLLM's image.")] = False,
    image: Annotated[str | None, typer.Option(help="Another image for --docker.")] = None,
    script_file: Annotated[
        Path | None, typer.Option("--script", metavar="FILE", help="Write a script with the reason for every flag.")
    ] = None,
    execute: Annotated[bool, typer.Option("--exec", help="Run it, in place of this process.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Print the exact command that serves a checkpoint on a class of cards. Exit 1 when it does not fit.

    The command alone goes to stdout; what was decided, and warnings, to stderr.
    """
    with reported(RefusedError, LaunchError, debug=debug), opened(checkpoint, revision) as (root, mirror):
        described = describe(root, mirror)
        place = Place(checkpoint, mirror.commit if mirror else None, port)
        called = name or Path(checkpoint if mirror else root.resolve()).name
        if execute and vllm is None and not docker:
            vllm = installed_vllm()
        adapters = tuple(_adapter(text, described, called) for text in lora or ())
        wish = Wish(vllm, gpus, context, mtp, not no_lora, adapters, tuple(vllm_arguments or ()))
        if profile is None:
            if execute or docker or script_file is not None:
                raise InputError(
                    f"which way to serve? Give --profile, one of {', '.join(shipped_profiles())}, or your own .yaml."
                )
            fitting = _print_choice(described, place, called, wish, as_json=as_json)
            raise typer.Exit(0 if fitting else 1)
        serving = decide(*load_profile(profile), described, called, wish)
        if execute:
            _check(root, mirror, described, serving)
        command = docker_command(serving, place, image) if docker else vllm_command(serving, place)
        if script_file is not None:
            _write(script_file, script(serving, command))
        if as_json:
            typer.echo(json.dumps(_as_json(serving, command), indent=2))
        else:
            _print_decisions(serving)
            typer.echo(command.text())
    if execute:
        with reported(LaunchError, debug=debug):
            sys.stdout.flush()
            launch(command)


def profiles_command(
    profile: Annotated[str | None, typer.Argument(help="One profile: its flags and their reasons.")] = None,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="As docs/serving.md has it.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """List the serve profiles; of one, every flag with its reason."""
    with reported(debug=debug):
        names = [profile] if profile else shipped_profiles()
        found = dict(load_profile(name) for name in names)
        if as_json:
            typer.echo(json.dumps({name: p.model_dump(mode="json") for name, p in found.items()}, indent=2))
        elif as_markdown:
            typer.echo(profile_page(profile, found[profile]) if profile in found else whole_page(), nl=False)
        elif profile:
            for name, one in found.items():
                _print_profile(name, one)
        else:
            table = Table("profile", "cards", "context", "MTP", "for", box=None, pad_edge=False)
            for name, one in found.items():
                drafts = ", else ".join(f"{d.num_speculative_tokens or 'off'}{condition_text(d.when)}" for d in one.mtp)
                table.add_row(name, one.gpus, f"{one.context.tokens:,}", drafts, one.title)
            _console().print(table)


def _console(*, stderr: bool = False) -> Console:
    """A terminal's own width; into a pipe or file, wide enough that a table can be read."""
    file = sys.stderr if stderr else sys.stdout
    return Console(file=file, highlight=False, soft_wrap=True, width=None if file.isatty() else PIPE_WIDTH)


def _check(root: Path, mirror: HubMirror | None, checkpoint: Described, serving: Serving) -> None:
    """Asks the law book before minutes are spent on starting a server: most faults that it knows start without a word."""
    if not checkpoint.quantized:
        return  # the book is about quantized checkpoints
    from assemble.verify import verify  # the whole book; nothing else here needs it

    errors = verify(root, tensor_parallel=serving.cards.count, reader=mirror).errors
    if errors:
        first = errors[0]
        raise RefusedError(
            f"not started: the checkpoint breaks {len(errors)} rule{'s' if len(errors) > 1 else ''}, first {first.rule} at "
            f"{first.where}: {first.found}, expected {first.expected}. python -m assemble verify says more, and what mends it."
        )


def _adapter(text: str, checkpoint: Described, called: str) -> Any:
    name, equals, directory = text.partition("=")
    if not (name and equals and directory):
        raise InputError(f"--lora {text!r}: give a name and a directory, such as ft=./my-adapter")
    known = (called, checkpoint.made_from or "", checkpoint.checkpoint.root.name)
    return check_adapter(name, Path(directory), checkpoint.architecture, known)


def _print_decisions(serving: Serving) -> None:
    console = _console(stderr=True)
    console.print(Text(f"{serving.name}: {serving.profile.title}", "bold"))
    console.print(Text(f"vLLM {serving.vllm} on {serving.cards}; {_pool(serving)}"))
    for note in serving.notes:
        console.print(Text(f"- {note}"))
    for warning in serving.warnings:
        console.print(Text.assemble(("warning: ", "yellow"), warning))


def _pool(serving: Serving) -> str:
    concurrency = serving.fit.concurrency(serving.context)
    pool = f"KV pool {serving.fit.pool_tokens:,} tokens, {concurrency:.2f} requests of {serving.context:,}"
    return f"{pool} (an estimate: python -m assemble fit shows it)"


def _print_choice(checkpoint: Described, place: Place, called: str, wish: Wish, *, as_json: bool) -> list[str]:
    """Prints which of the shipped profiles fit, and returns their names."""
    rows: list[dict[str, Any]] = []
    for name in shipped_profiles():
        profile = load_profile(name)[1]
        try:
            serving = decide(name, profile, checkpoint, called, wish)
            rows.append({"profile": name, "fits": True, "context": serving.context, "pool_tokens": serving.fit.pool_tokens})
        except RefusedError as error:
            rows.append({"profile": name, "fits": False, "reason": error.reason})
    fitting = [row["profile"] for row in rows if row["fits"]]
    if as_json:
        typer.echo(json.dumps({"profiles": rows}, indent=2))
        return fitting
    table = Table("profile", box=None, pad_edge=False)
    table.add_column("context", justify="right")
    table.add_column("KV pool, tokens", justify="right")
    table.add_column("for")
    for row in rows:
        if row["fits"]:
            numbers = (f"{row['context']:,}", f"{row['pool_tokens']:,}")
            table.add_row(row["profile"], *numbers, load_profile(row["profile"])[1].title)
        else:
            table.add_row(row["profile"], "-", "-", row["reason"])
    _console().print(table)
    called_as = shlex.quote(place.model)
    if fitting:
        typer.echo(f"next: python -m assemble serve {called_as} --profile {fitting[0]}", err=True)
    else:
        typer.echo(
            f"none fits. Other cards: --gpus 2x24GB. Every term: python -m assemble fit {called_as} --gpus 2x24GB", err=True
        )
    return fitting


def _print_profile(name: str, profile: Any) -> None:
    console = _console()
    console.print(Text(f"{name}: {profile.title}", "bold"))
    console.print(Text(f"{profile.gpus} ({', '.join(profile.cards)}), vLLM {profile.vllm.default} ({profile.vllm.range})"))
    console.print(Text(f"context {profile.context.tokens:,}: {profile.context.reason}"))
    for draft in profile.mtp:
        console.print(Text(f"MTP {draft.num_speculative_tokens or 'off'}{condition_text(draft.when)}: {draft.reason}"))
    table = _reasons("given")
    for entry in (*profile.environment, *profile.flags):
        table.add_row(Text(flag_text(entry)), Text(f"{entry.reason}{condition_text(entry.when)}"))
    console.print(table)
    left = _reasons("left out")
    for item in profile.left_out:
        left.add_row(Text(flag_text(item)), Text(item.reason))
    console.print(left)


def _reasons(title: str) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(title, overflow="fold")
    table.add_column("reason")
    return table


def _write(path: Path, text: str) -> None:
    """Writes the script; a file that is not one of ours stays."""
    if path.exists() and MARK not in path.read_text(errors="replace"):
        raise InputError(f"{path} exists, and `serve` did not write it. Choose another name, or remove it.")
    path.write_text(text)
    path.chmod(0o755)


def _as_json(serving: Serving, command: Command) -> dict[str, Any]:
    return {
        "profile": serving.name,
        "vllm": serving.vllm,
        "cards": str(serving.cards),
        "command": command.text(),
        "argv": command.argv,
        "environment": command.environment,
        "context": serving.context,
        "pool_tokens": serving.fit.pool_tokens,
        "concurrency": serving.fit.concurrency(serving.context),
        "reasons": serving.reasons,
        "adapters": [{"name": a.name, "rank": a.rank, "modules": a.modules, "base": a.base} for a in serving.adapters],
        "notes": list(serving.notes),
        "warnings": list(serving.warnings),
        "fit": serving.fit.as_json(),
    }
