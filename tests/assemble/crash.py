"""Kills a command before each of its steps, with SIGKILL, and checks what is left. Run as a script, so that it can fork.

    python -m tests.assemble.crash CHECKPOINT WORK MODE FIRST COMMAND...

CHECKPOINT is broken; COMMAND is `repair` or `splice` without the checkpoint. Each round works on a copy of hard links, so
that a write through one would show in CHECKPOINT itself. MODE `exchange` or `renames` says how the directories are swapped;
FIRST is the first step to kill at. Prints the number of kills.
"""

import contextlib
import hashlib
import io
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from assemble.__main__ import app
from assemble.mend import swap

EVENTS = {"os.link", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.symlink"}
State = dict[str, str]


def state(root: Path) -> State:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in root.iterdir()}


def kill_at(step: int) -> None:
    """Arms the process: it dies before its `step`-th change of the file system."""
    left = [step]

    def count() -> None:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if event in EVENTS or writes:
            count()

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            count()
            return function(*arguments)

        return call

    os.pwrite, os.fsync, swap._exchange = counted(os.pwrite), counted(os.fsync), counted(swap._exchange)
    sys.addaudithook(audit)


def command(arguments: list[str]) -> int:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        result = CliRunner().invoke(app, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code


def forked(arguments: list[str], step: int = 0) -> int:
    """Runs the command in a child; its exit code, or -9 when it was killed."""
    child = os.fork()
    if child == 0:
        os.fsync = lambda _: None  # slow, and for power cuts: a killed process's writes are not lost
        if step:
            kill_at(step)
        os._exit(command(arguments))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def link_copy(template: Path, root: Path) -> None:
    root.mkdir(parents=True)
    for path in template.iterdir():
        os.link(path, root / path.name)


def rounds(template: Path, work: Path, first: int, arguments: list[str]) -> Iterator[int]:
    verb, *options = arguments
    command(["repair", str(template), "--dry-run"])  # so that no child has to import what is imported at the first use
    old = state(template)
    root = work / "whole" / "checkpoint"
    link_copy(template, root)
    assert forked([verb, str(root), *options]) == 0
    new = state(root)
    assert new != old
    for step in range(first, 1000):
        root = work / str(step) / "checkpoint"
        link_copy(template, root)
        code = forked([verb, str(root), *options], step)
        if code == 0:
            return
        assert code == -signal.SIGKILL, code
        if root.exists():
            assert state(root) in (old, new), step  # a reader sees one or the other, before any recovery
        else:
            assert swap._exchange is cannot_exchange, "the path of the checkpoint was empty"
        assert forked([verb, str(root), *options]) == 0
        assert state(root) == new, step
        assert [p.name for p in root.parent.iterdir()] == ["checkpoint"], step
        assert state(template) == old, "written through a hard link"
        shutil.rmtree(root.parent)
        yield step


def cannot_exchange(one: Path, other: Path) -> bool:
    return False


if __name__ == "__main__":
    checkpoint, work, mode, first, *arguments = sys.argv[1:]
    if mode == "renames":
        swap._exchange = cannot_exchange
    sys.stdout.write(str(sum(1 for _ in rounds(Path(checkpoint), Path(work), int(first), arguments))))
