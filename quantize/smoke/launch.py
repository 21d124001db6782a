"""Starts the runner with another interpreter or in a container, waits, and ends it for good when its time is up."""

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from assemble.errors import InputError
from quantize.console import Reporter, duration
from quantize.smoke.passes import End, Pass, read_pass
from quantize.smoke.settings import RUNNER, Ask
from recipes.vllm_release import IMAGE

TIMEOUT_SECONDS = 1800.0  # for a pass: 27B from a cold disk, and the first tuning of the GDN kernels
GRACE_SECONDS = 10.0  # between asking a process to end and ending it
POLL_SECONDS = 0.5
NOT_OURS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")  # would lead another interpreter to our packages
PASSED_ON = ("VLLM_", "NCCL_", "CUDA_VISIBLE_DEVICES")  # variables that a container gets


class Place(Protocol):
    """Where a vLLM is that the runner can be started with."""

    @property
    def reached(self) -> str:
        """How a report calls it."""

    def command(self, settings: Path, result: Path, checkpoint: Path) -> list[str]:
        """The command that runs the runner."""

    def environment(self) -> dict[str, str]:
        """Its environment."""

    def end(self) -> None:
        """Ends what outlives the process that was started."""


@dataclass(frozen=True)
class Interpreter:
    """The Python of an environment that has vLLM."""

    python: Path
    reached: str = "python"

    def command(self, settings: Path, result: Path, checkpoint: Path) -> list[str]:
        """The runner, by that Python."""
        return [str(self.python), str(RUNNER), str(settings), str(result), "--model", str(checkpoint)]

    def environment(self) -> dict[str, str]:
        """Ours; for another interpreter without what would lead it to our packages."""
        own = self.python == Path(sys.executable)
        return {key: value for key, value in os.environ.items() if own or key not in NOT_OURS}

    def end(self) -> None:
        """Nothing outlives the process group."""


@dataclass(frozen=True)
class Container:
    """A Docker image that has vLLM.

    The checkpoint and the runner are mounted read-only, each under its own path; only the run's folder can be written. The
    container runs as root, as the image is made to.
    """

    image: str = IMAGE
    reached: str = "image"

    @property
    def name(self) -> str:
        """The container's name, by which it is ended."""
        return f"nvfp4-mtp-smoke-{os.getpid()}"

    def command(self, settings: Path, result: Path, checkpoint: Path) -> list[str]:
        """`docker run` of the runner."""
        mounts = [(checkpoint, "ro"), (RUNNER.parent, "ro"), (result.parent, "rw")]
        variables = sorted(name for name in os.environ if name.startswith(PASSED_ON))
        return [
            *("docker", "run", "--rm", "--init", "--name", self.name, "--gpus", "all", "--ipc", "host"),
            *(word for path, mode in mounts for word in ("--volume", f"{path}:{path}:{mode}")),
            *(word for name in variables for word in ("--env", name)),
            *("--entrypoint", "python3", self.image),
            *(str(RUNNER), str(settings), str(result), "--model", str(checkpoint)),
        ]

    def environment(self) -> dict[str, str]:
        """Docker's client gets ours."""
        return dict(os.environ)

    def end(self) -> None:
        """Ends the container: it does not end with the client that started it."""
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(  # noqa: S603
                ["docker", "kill", self.name],  # noqa: S607 - the user's own docker
                capture_output=True,
                timeout=60,
                check=False,
            )


def here() -> Interpreter:
    """This environment, when it has a vLLM.

    Raises:
        InputError: it has none.
    """
    if importlib.util.find_spec("vllm") is None:
        raise InputError(
            "this environment has no vLLM (and should have none: its torch would replace ours). Say where one is: "
            "--vllm-python PYTHON, --docker or --docker-image IMAGE (`run`: --vllm-image), or --endpoint URL (`run`: "
            "--vllm-endpoint); or --prepare DIR, to run the test on another machine."
        )
    return Interpreter(Path(sys.executable))


def check_place(place: Place) -> None:
    """Refuses an interpreter or a Docker that is not there.

    Raises:
        InputError: it cannot be run.
    """
    if isinstance(place, Interpreter) and shutil.which(str(place.python)) is None:
        raise InputError(
            f"{place.python} cannot be run: there is no such program. Give the Python of an environment that has vLLM."
        )
    if isinstance(place, Container) and shutil.which("docker") is None:
        raise InputError("docker is not on the PATH. Install it, or give --vllm-python PYTHON or --endpoint URL.")


def run_passes(place: Place, ask: Ask, folder: Path, timeout: float, reporter: Reporter) -> dict[str, Pass]:
    """Runs the passes one after the other; a checkpoint that does not load once is not tried again.

    Args:
        place: Where vLLM is.
        ask: What it is to do.
        folder: Where settings, results and logs are kept.
        timeout: Seconds a pass.
        reporter: Says what is going on.
    """
    folder.mkdir(parents=True, exist_ok=True)
    passes: dict[str, Pass] = {}
    for name in ask.pass_names:
        passes[name] = run_pass(place, ask, name, folder.absolute(), timeout, reporter)
        if not passes[name].loaded:
            break
    return passes


def run_pass(place: Place, ask: Ask, name: str, folder: Path, timeout: float, reporter: Reporter) -> Pass:
    """Runs one pass."""
    settings, result = folder / f"{name}.settings.json", folder / f"{name}.json"
    log = result.with_suffix(".log")
    for stale in (result, log):
        stale.unlink(missing_ok=True)
    settings.write_text(json.dumps(ask.settings(name)), encoding="utf-8")
    command = place.command(settings, result, ask.checkpoint.absolute())
    with log.open("ab") as output:
        try:
            process = subprocess.Popen(  # noqa: S603 - the user's own interpreter or docker, on our own file
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=place.environment(),
                start_new_session=True,
            )
        except OSError as error:
            raise InputError(f"{command[0]} cannot be run ({error.strerror}).") from error
    started = time.monotonic()
    reporter.line(f"  {name}: starting vLLM (up to {duration(timeout)}; log: {log})")
    try:
        code = _wait(process, name, result, timeout, reporter)
    finally:
        _end(process, place)
    took = time.monotonic() - started
    reporter.line(f"  {name}: {'took' if code == 0 else 'stopped after'} {duration(took)}")
    if code is None:
        return read_pass(name, result, End.TIMEOUT, f"not done within {duration(timeout)}")
    written = read_pass(name, result)
    if code != 0 and written.end is End.UNKNOWN:
        return read_pass(name, result, End.DIED, _death(code))
    return written


def _wait(process: subprocess.Popen[bytes], name: str, result: Path, timeout: float, reporter: Reporter) -> int | None:
    """Waits for the end and says each new phase. None when the time is up."""
    deadline, phase = time.monotonic() + timeout, ""
    while process.poll() is None:
        if time.monotonic() > deadline:
            return None
        time.sleep(POLL_SECONDS)
        reached = _phase(result)
        if reached and reached != phase:
            phase = reached
            reporter.line(f"  {name}: {phase}")
    return process.returncode


def _phase(result: Path) -> str:
    try:
        return str(json.loads(result.read_text(encoding="utf-8"))["phase"])
    except (OSError, ValueError, KeyError):
        return ""


def _end(process: subprocess.Popen[bytes], place: Place) -> None:
    """Ends the process and all it started: first politely."""
    if process.poll() is None:
        place.end()
    for sign, patience in ((signal.SIGTERM, GRACE_SECONDS), (signal.SIGKILL, GRACE_SECONDS)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)  # also when the process itself is gone: its workers may not be
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)


def _death(code: int) -> str:
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def prepare(ask: Ask, folder: Path) -> list[str]:
    """Writes settings and the runner, for a vLLM on another machine.

    Returns:
        The commands to give there, and the one to give here afterwards.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(RUNNER, folder / RUNNER.name)
    for name in ask.pass_names:
        (folder / f"{name}.settings.json").write_text(json.dumps(ask.settings(name)), encoding="utf-8")
    runs = [f"python3 {RUNNER.name} {name}.settings.json {name}.json --model CHECKPOINT" for name in ask.pass_names]
    return [*runs, f"python -m quantize smoke {ask.checkpoint} --result {folder}"]
