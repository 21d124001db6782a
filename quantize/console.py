"""What a person sees while a run works: progress with an ETA on a terminal, plain lines elsewhere. All on stderr."""

import contextlib
import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

PLAIN_INTERVAL = 15.0  # seconds between progress lines when stderr is not a terminal


class Advance(Protocol):
    """Takes in progress: units done since the last call, and a few words on where that is."""

    def __call__(self, n: int, reached: str = "") -> None:
        """Advances by `n` units."""


class Reporter:
    """Reports a run's progress on stderr."""

    def __init__(self) -> None:
        self._console = Console(file=sys.stderr, highlight=False, soft_wrap=True)

    def line(self, text: str) -> None:
        """One plain line."""
        self._console.print(text, markup=False)

    @contextlib.contextmanager
    def task(self, description: str, total: int) -> Iterator["Advance"]:
        """Shows progress of something with `total` units; yields a function that is called with each advance.

        The function also takes a few words that say what was reached.
        """
        if self._console.is_terminal:
            columns = (
                TextColumn("  {task.description}"),
                BarColumn(),
                TaskProgressColumn(),
                TimeElapsedColumn(),
                TextColumn("ETA"),
                TimeRemainingColumn(),
            )
            # Rich would print what libraries print above the bar; `output_to` sends that elsewhere.
            bar = Progress(*columns, console=self._console, transient=True, redirect_stdout=False, redirect_stderr=False)
            with bar as progress:
                task = progress.add_task(description, total=max(total, 1))

                def advance(n: int, reached: str = "") -> None:
                    progress.update(task, advance=n, description=f"{description} {reached}".rstrip())

                yield advance
        else:
            yield _PlainTask(self, description, total).advance


class _PlainTask:
    def __init__(self, reporter: Reporter, description: str, total: int) -> None:
        self._reporter, self._description, self._total = reporter, description, max(total, 1)
        self._done, self._started = 0, time.monotonic()
        self._last = self._started

    def advance(self, n: int, reached: str = "") -> None:
        self._done += n
        now = time.monotonic()
        if now - self._last >= PLAIN_INTERVAL and self._done:
            self._last = now
            left = (now - self._started) * (self._total - self._done) / self._done
            percent = 100 * self._done / self._total
            what = f"{self._description} {reached}".rstrip()
            self._reporter.line(f"  {what}: {percent:.0f} %, about {duration(left)} left")


class _Log:
    """A text stream into a file that is opened for each write, so that late writers never meet a closed file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, text: str) -> int:
        with self._path.open("a", encoding="utf-8") as file:
            return file.write(text)

    def flush(self) -> None:
        """Nothing is held back."""

    def isatty(self) -> bool:
        return False


@contextlib.contextmanager
def output_to(path: Path) -> Iterator[None]:
    """Sends what libraries print, warn and log to a file: their chatter is for the curious, not for the terminal."""
    path.touch()
    log: TextIO = _Log(path)  # type: ignore[assignment]
    logging.captureWarnings(capture=True)
    handlers = [(handler, handler.stream) for handler in _handlers()]
    try:
        for handler, _ in handlers:
            handler.setStream(log)
        with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
            yield
    finally:
        for handler, stream in handlers:
            handler.setStream(stream)
        logging.captureWarnings(capture=False)


def _handlers() -> Iterator["logging.StreamHandler[TextIO]"]:
    """What loggers write to the terminal with: a library that was imported earlier keeps the stream of that time."""
    known = list(logging.root.manager.loggerDict.values())  # a copy: another thread may be importing what has loggers
    for logger in (logging.root, *(one for one in known if isinstance(one, logging.Logger))):
        yield from (handler for handler in logger.handlers if type(handler) is logging.StreamHandler)


def duration(seconds: float) -> str:
    """`0.4 s`, `12 s`, `3 min 20 s`, `2 h 05 min`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def size(nbytes: float) -> str:
    """`812 B`, `9.5 MB`, `55.6 GB` (powers of 1000)."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000 or unit == "GB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    raise AssertionError("unreachable")
