"""Runs `python -m quantize ...` and stops it at a chosen point, as a crash, a full disk or Ctrl-C would.

    python -m tests.quantize.interrupting HOW COUNT PATTERN ARGUMENTS...

Every change to the file system is an action with a name such as `pwrite /path/model-00001-of-00002.safetensors.tmp`.
Before the COUNT-th action whose name matches PATTERN the process is killed (HOW = kill), interrupted (interrupt), or
told that the disk is full (full).
"""

import errno
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HOW, COUNT, PATTERN = (sys.argv[1], int(sys.argv[2]), re.compile(sys.argv[3])) if len(sys.argv) > 3 else ("", 0, re.compile(""))
seen = 0


def act(name: str) -> None:
    global seen  # noqa: PLW0603
    if not PATTERN.search(name):
        return
    seen += 1
    if seen != COUNT:
        return
    if HOW == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif HOW == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
    else:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)


def watch(name: str, where: Callable[..., Any]) -> None:
    real = getattr(os, name)

    def watched(*args: Any, **kwargs: Any) -> Any:
        act(f"{name} {where(*args)}")
        return real(*args, **kwargs)

    setattr(os, name, watched)


def of_descriptor(descriptor: int, *_: Any) -> str:
    return str(Path(f"/proc/self/fd/{descriptor}").readlink())


def of_target(*paths: Any, **_: Any) -> str:
    return str(paths[min(1, len(paths) - 1)])


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs are started without
    for call in ("pwrite", "fsync"):
        watch(call, of_descriptor)
    for call in ("replace", "rename", "link", "unlink"):
        watch(call, of_target)
    from quantize.__main__ import app

    if "/quantize/" in sys.argv[3]:
        from quantize.streaming import engine

        engine.SAVE_SECONDS = 0  # hidden states are saved behind every layer
    app(sys.argv[4:], prog_name="quantize")
