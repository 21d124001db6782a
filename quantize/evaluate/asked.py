"""What the command was asked for, from names and paths to finished reports."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from assemble.errors import InputError
from assemble.hub import is_hub_id
from quantize.console import Reporter, duration, output_to, size
from quantize.evaluate import comparison
from quantize.evaluate.evaluation import Drafting, evaluate, held_out, open_subject, resolve_device, write_report
from quantize.evaluate.report import Report
from quantize.evaluate.terminal import print_report
from quantize.source import fetch
from recipes.schema import Calibration, Evaluation

COMPARISON = "evaluation-comparison"
LOG = "log.txt"  # what libraries print


@dataclass(frozen=True)
class Asked:
    """The command's arguments.

    Attributes:
        checkpoints: Directories or Hub ids.
        source: Directory or Hub id.
        mtp_from: Directory or Hub id of the head's checkpoint; None: the source.
        data: Held-out text; None: the recipe's dataset.
        out: Folder of the report; None: beside the checkpoint.
        settings: The recipe's `evaluation`.
        calibration: The recipe's `calibration`.
        drafting: What to measure of the head.
        device: `auto`, `cuda` or `cpu`.
    """

    checkpoints: Sequence[str]
    source: str
    mtp_from: str | None
    data: Path | None
    out: Path | None
    settings: Evaluation
    calibration: Calibration
    drafting: Drafting
    device: str


@dataclass(frozen=True)
class Finished:
    """The reports, where each lies, and the folder of all."""

    reports: list[Report]
    folders: list[Path]
    out: Path

    def as_json(self) -> dict[str, Any]:
        """One report's facts, or the comparison's."""
        return self.reports[0].facts() if len(self.reports) == 1 else comparison.as_json(self.reports)

    def show(self, console: Console) -> None:
        """Prints the reports, and the comparison of several."""
        for report in self.reports:
            _print(report, console)
        if len(self.reports) > 1:
            comparison.print_comparison(self.reports, console)
        shown = "comparison.md" if len(self.reports) > 1 else "report.md"
        seconds = sum(report.seconds for report in self.reports)
        peak = max(report.peak_memory_bytes for report in self.reports)
        console.print(
            f"\n{self.out / shown} has all of it, with plots ({duration(seconds)}, {size(peak)} of host memory)", markup=False
        )


def run(asked: Asked, reporter: Reporter) -> Finished:
    """Evaluates every checkpoint and writes the reports.

    Raises:
        InputError: whatever is the input's fault.
    """
    device = resolve_device(asked.device)
    source = fetch(asked.source, None)
    head = fetch(asked.mtp_from, None).root if asked.mtp_from else None
    fetched = [fetch(name, None) for name in asked.checkpoints]
    names = comparison.names([f.root for f in fetched])
    names = [f.public_name if f.revision else name for f, name in zip(fetched, names, strict=True)]
    out = _out(asked, [f.root for f in fetched])
    reports, folders = list[Report](), list[Path]()
    subjects = [
        open_subject(each.root, source.root, head, name, source.public_name) for each, name in zip(fetched, names, strict=True)
    ]
    out.mkdir(parents=True, exist_ok=True)
    with output_to(out / LOG):
        known = [each.root.with_name(each.root.name + ".run") / "calibrate" / "rows.npy" for each in fetched]
        rows = held_out(subjects[0], asked.data, asked.settings, asked.calibration, known)
    for subject in subjects:
        name = subject.name
        folder = out if len(fetched) == 1 else out / name.replace("/", "--")
        folder.mkdir(parents=True, exist_ok=True)
        if len(fetched) > 1:
            reporter.line(f"{name}:")
        with output_to(folder / LOG):
            reports.append(evaluate(subject, rows, asked.settings, asked.drafting, device, reporter))
        folders.append(folder)
        write_report(reports[-1], folder)
    if len(reports) > 1:
        comparison.write_comparison(reports, out)
    return Finished(reports, folders, out)


def _out(asked: Asked, roots: list[Path]) -> Path:
    """The folder of the report.

    Raises:
        InputError: it is a checkpoint's.
    """
    if asked.out is not None:
        out = asked.out
    elif len(roots) > 1:
        out = Path(COMPARISON)
    else:
        name = asked.checkpoints[0]
        out = (
            Path(name.replace("/", "--") + ".evaluation")
            if is_hub_id(name)
            else roots[0].with_name(roots[0].name + ".evaluation")
        )
    if (out / "config.json").exists():
        raise InputError(f"--out {out} is a checkpoint's folder, and reports do not belong into one. Choose another.")
    return out


def _print(report: Report, console: Console) -> None:
    from quantize.evaluate import mtp

    measured = report.mtp
    head = (lambda c: mtp.print_result(measured, c)) if measured is not None else None
    print_report(report.facts(), report.walked.layers, console, head)
    console.print()
