"""The decided flags as text: a `vllm serve` line, a `docker run` line, a commented script. Everything is shell-quoted."""

import shlex
import textwrap
from dataclasses import dataclass
from pathlib import Path

from assemble.serve.deciding import Serving
from assemble.serve.extra import Given
from recipes.vllm_release import REPOSITORY

PORT = 8000  # vLLM's own, and the one inside a container
SHARED_MEMORY = "4g"
DOCKER_REASONS = {
    "--shm-size": "the workers of several cards talk through /dev/shm, and Docker's 64 MB are too few",
    "-v": "read-only: the server changes nothing of it",
    "-p": "this machine's port, then the container's",
}
MARK = "# Written by python -m assemble serve"


@dataclass(frozen=True)
class Place:
    """What is served, where, and how it is called there.

    Attributes:
        model: A directory or a Hub id.
        commit: The commit of a Hub id, else None.
        port: The port on this machine.
    """

    model: str
    commit: str | None
    port: int


@dataclass(frozen=True)
class Command:
    """A command line.

    Attributes:
        environment: Variables that it is run with.
        lines: Words, those of one flag together.
    """

    environment: dict[str, str]
    lines: tuple[tuple[str, ...], ...]

    @property
    def argv(self) -> list[str]:
        """All words, for `os.execvp`."""
        return [word for line in self.lines for word in line]

    def text(self) -> str:
        """For a shell: one flag a line."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " \\\n  ".join([*variables, *(shlex.join(line) for line in self.lines)])


def vllm_command(serving: Serving, place: Place) -> Command:
    """The `vllm serve` line."""
    lines = [("vllm", "serve", place.model), *_where(place)]
    if place.port != PORT:
        lines.append(("--port", str(place.port)))
    return Command({v.name: v.value for v in serving.environment}, (*lines, *(flag.argv for flag in serving.flags)))


def docker_command(serving: Serving, place: Place, image: str | None = None) -> Command:
    """The `docker run` line, with the checkpoint and the adapters mounted read-only.

    A snapshot in the Hugging Face cache is a folder of links to blobs beside it, so the whole repository is mounted. For a
    Hub id the cache itself is mounted, and HF_TOKEN is handed on by name: its value is in no command line.
    """
    run: list[tuple[str, ...]] = [("docker", "run", "--rm", "--gpus", "all")]
    if serving.cards.count > 1:
        run.append(("--shm-size", SHARED_MEMORY))
    run += [("-e", f"{v.name}={v.value}") for v in serving.environment]
    mounts, model = _mounts(place)
    run += [("-v", mount) for mount in mounts]
    if place.commit:
        run.append(("-e", "HF_TOKEN"))
    inside = {str(adapter.root): f"/lora/{adapter.name}" for adapter in serving.adapters}
    run += [("-v", f"{Path(root).resolve()}:{mount}:ro") for root, mount in inside.items()]
    run.append(("-p", f"{place.port}:{PORT}"))
    run.append((image or f"{REPOSITORY}:v{serving.vllm}", model))
    flags = [_moved(flag, inside) for flag in serving.flags]
    return Command({}, (*run, *_where(place), *(flag.argv for flag in flags)))


def script(serving: Serving, command: Command) -> str:
    """A bash script: the command, each flag under its reason."""
    note = textwrap.wrap(f"{serving.name}: {serving.profile.title}. vLLM {serving.vllm}, {serving.cards}.", 110)
    lines = ["#!/usr/bin/env bash", MARK, *(f"# {line}" for line in note)]
    lines += [f"# {line}" for sentence in (*serving.notes, *serving.warnings) for line in _wrapped(sentence)]
    lines += ["set -euo pipefail", ""]
    reasons = DOCKER_REASONS | serving.reasons
    for name, value in command.environment.items():
        lines += [f"# {line}" for line in _wrapped(reasons[name])]
        lines += [f"export {name}={shlex.quote(value)}", ""]
    head, *flags = command.lines
    lines.append("flags=(")
    for line in flags:
        name = line[1].partition("=")[0] if line[0] == "-e" else line[0]
        lines += [f"  # {part}" for part in _wrapped(reasons.get(name, ""))]
        lines.append(f"  {shlex.join(line)}")
    return "\n".join([*lines, ")", f'exec {shlex.join(head)} "${{flags[@]}}" "$@"', ""])


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 110, break_long_words=False, break_on_hyphens=False)


def _where(place: Place) -> list[tuple[str, ...]]:
    return [("--revision", place.commit)] if place.commit else []


def _mounts(place: Place) -> tuple[list[str], str]:
    """The mounts of the checkpoint, and its name inside."""
    if place.commit:
        from huggingface_hub import constants

        return [f"{Path(constants.HF_HOME).resolve()}:/root/.cache/huggingface"], place.model
    root = Path(place.model).resolve()
    if any(path.is_symlink() for path in root.iterdir()) and root.parent.name == "snapshots":
        return [f"{root.parents[1]}:/hub:ro"], f"/hub/snapshots/{root.name}"
    return [f"{root}:/model:ro"], "/model"


def _moved(flag: Given, inside: dict[str, str]) -> Given:
    """`--lora-modules` with the adapters' directories inside the container."""
    if flag.name != "--lora-modules":
        return flag
    pairs = (value.partition("=") for value in flag.values)
    return Given(flag.name, tuple(f"{name}={inside.get(root, root)}" for name, _, root in pairs), flag.reason)
