"""What `verify` does besides the law book: a checkpoint on the Hub, and vLLM's own loader."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from assemble.checkpoint import Checkpoint
from assemble.errors import InputError
from assemble.hub import HubMirror, opened
from assemble.rules import Severity
from assemble.verify import Report, verify
from assemble.vllm_load import KINDS, Opinion, second_opinion

DOWNLOADED = "DIR"  # what a downloaded copy of a Hub id is called in the commands that are proposed


@dataclass(frozen=True)
class Examination:
    """Everything that was found out about a checkpoint.

    Attributes:
        report: The law book's findings, and vLLM's where it was asked.
        opinion: What vLLM's loader said.
        fetched: For a checkpoint on the Hub: `commit`, `fetched_bytes`, `requests`, `total_bytes`.
    """

    report: Report
    opinion: Opinion | None
    fetched: dict[str, Any] | None

    @property
    def notes(self) -> list[str]:
        """What a person is told beside the findings."""
        notes = []
        if self.opinion is not None:
            notes.append(self.opinion.verdict)
        if self.fetched is not None:
            some, whole = (f"{self.fetched[key] / 1e6:,.2f} MB" for key in ("fetched_bytes", "total_bytes"))
            commit, requests = self.fetched["commit"], self.fetched["requests"]
            notes.append(
                f"commit {commit}: fetched {self.fetched['fetched_bytes']} bytes ({some} of {whole}) in {requests} requests"
            )
            if any(DOWNLOADED in f.mend.split() for f in self.report.findings):
                notes.append(f"to mend it: hf download {self.report.root} --local-dir {DOWNLOADED}, then the commands above")
        return notes

    def as_json(self) -> dict[str, Any]:
        """The report as plain data, with what else was found out."""
        vllm = {"vllm": self.opinion.as_json()} if self.opinion is not None else {}
        return self.report.as_json() | vllm | ({"hub": self.fetched} if self.fetched is not None else {})


def examine(
    reference: str,
    revision: str | None = None,
    *,
    source: Path | None = None,
    head: Path | None = None,
    deep: bool = False,
    with_vllm: Path | None = None,
    tensor_parallel: int = 1,
    **options: Any,
) -> Examination:
    """Verifies a directory or a Hub id, and asks vLLM's loader when it is given an interpreter that has it.

    Args:
        reference: A directory, or a Hub id.
        revision: Branch, tag or commit of a Hub id.
        source: As for `verify`.
        head: As for `verify`.
        deep: As for `verify`.
        with_vllm: The interpreter of an environment that has vLLM.
        tensor_parallel: The number of GPUs it is to be split over.
        options: Further arguments of `verify`.

    Raises:
        InputError: it cannot be read; or, for a Hub id, its values are asked for; or no such interpreter.
        VllmCrashError: vLLM's process died.
    """
    with opened(reference, revision) as (root, mirror):
        if mirror is not None and (deep or source or head):
            raise InputError(
                "--deep, --source and --head read all of the weights' bytes, which a Hub id is read without. "
                f"Download it first: hf download {reference} --local-dir {DOWNLOADED}, then verify {DOWNLOADED}."
            )
        with _progress(root, reference, values=deep or source is not None) as progress:
            report = verify(
                root,
                source=Checkpoint.open(source) if source else None,
                head=Checkpoint.open(head) if head else None,
                deep=deep,
                tensor_parallel=tensor_parallel,
                reader=mirror,
                progress=progress,
                **options,
            )
        opinion = _second_opinion(with_vllm, root, tensor_parallel) if with_vllm else None
    report = _merged(report, opinion)
    if mirror is None:
        return Examination(report, opinion, None)
    return Examination(_of_hub(report, reference), opinion, _fetched(mirror))


@contextlib.contextmanager
def _progress(root: Path, reference: str, *, values: bool) -> Iterator[Callable[[int], None]]:
    """On a terminal, shows how far the reading of values is; headers alone take no time."""
    console = Console(stderr=True)
    total = sum(path.stat().st_size for path in root.glob("*.safetensors") if path.is_file())
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not (values and console.is_terminal)) as bar:
        task = bar.add_task(f"reading {reference}", total=total)
        yield lambda nbytes: bar.update(task, advance=nbytes)


def _second_opinion(python: Path, root: Path, tp: int) -> Opinion:
    with Console(stderr=True).status("vLLM's own loader reads the headers (7 s to import it, then seconds)"):
        return second_opinion(python, root, tp)


def _merged(report: Report, opinion: Opinion | None) -> Report:
    """The report, with vLLM's findings among its own."""
    if opinion is None:
        return report
    findings = sorted((*opinion.findings, *report.findings), key=lambda f: list(Severity).index(f.severity))
    rules = (*report.rules, *(f"VLLM-{kind}" for kind in KINDS))
    return dataclasses.replace(report, rules=rules, findings=tuple(findings))


def _of_hub(report: Report, reference: str) -> Report:
    """The report under its Hub id; the commands that mend it are for a downloaded copy, not for the mirror, which is gone."""
    mirror = str(report.root)
    findings = tuple(
        dataclasses.replace(f, found=f.found.replace(mirror, reference), mend=f.mend.replace(mirror, DOWNLOADED))
        for f in report.findings
    )
    return dataclasses.replace(report, root=Path(reference), findings=findings)


def _fetched(mirror: HubMirror) -> dict[str, Any]:
    return {
        "commit": mirror.commit,
        "fetched_bytes": mirror.fetched_bytes,
        "requests": mirror.requests,
        "total_bytes": mirror.total_bytes,
    }
