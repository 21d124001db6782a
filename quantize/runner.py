"""Runs the stages: skips what is done, refuses what changed, and lets OUT appear in one rename.

While a run works, everything lies in `OUT.run/`, one folder a stage. A stage is finished when its `stage.json` is there;
it is written last. A run that is killed is continued by the same command. When the checkpoint is complete, it appears as
OUT (`release.py`), and the weights are dropped from `OUT.run/`; the records stay there.

An optional stage runs when it is asked for, before or after OUT is there; OUT's card is renewed then. Its record is kept,
and counts for the card whenever it is one of this checkpoint; so does `failed.json`, what it says when it did not pass.
"""

import contextlib
import fcntl
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from assemble.errors import InputError
from assemble.jsonfile import read_object, write_object
from quantize import release
from quantize.console import Reporter, duration
from quantize.errors import CheckFailedError
from quantize.fingerprint import difference, fingerprint
from quantize.hashing import ShardHashes, settle
from quantize.libraries import wait_until_imported
from quantize.machine import peak_memory_bytes, reset_peak_memory
from quantize.pipeline import PIPELINE, check
from quantize.planning import check_paths
from quantize.provenance import provenance
from quantize.stage import FAILED, STARTED, Context, Record, Request, Stage, read_record

FETCH, *LATER = PIPELINE


class StaleRunError(InputError):
    """A finished stage in OUT.run was made from something else than what is asked for now."""


class BusyError(InputError):
    """Another process is working on the same OUT."""


@dataclass(frozen=True)
class Outcome:
    """A finished run: its records by stage, and whether there was nothing to do."""

    out: Path
    records: dict[str, Record]
    already_complete: bool


def run(request: Request, reporter: Reporter) -> Outcome:
    """Runs whatever of the pipeline is not finished, and makes OUT.

    Raises:
        InputError: whatever is the input's fault; nothing at OUT then.
        CheckFailedError: a check failed. Before OUT is there, it does not appear; later, it stays as it is.
    """
    check_paths(request)
    request.workspace.mkdir(parents=True, exist_ok=True)
    with _locked(request), contextlib.ExitStack() as background:
        for note in check(request):
            reporter.line(f"note: {note}")
        release.recover(request)
        _settle(request)  # of a run that was killed
        finished = request.out.exists()
        if finished:
            release.check_unchanged(request)
        state = _Run(request, reporter, finished)
        state.take(FETCH)
        state.hashes = background.enter_context(ShardHashes(state.records[FETCH.name], request.workspace / FETCH.name))
        for stage in LATER:
            if not stage.released:
                state.take(stage)
        renewed = finished and release.renew_card(request)
        if not finished:
            release.release(request)
        if renewed:
            reporter.line(f"the model card in {request.out} was renewed")
        state.finished = True
        release.drop_weights(request)
        for stage in LATER:
            if stage.released:
                state.take(stage)
        return Outcome(request.out, state.records, finished and not renewed)


@dataclass
class _Run:
    """One run's state: what is asked for, whether OUT is there, the records and failures so far, the hashing under way."""

    request: Request
    reporter: Reporter
    finished: bool
    records: dict[str, Record] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    hashes: ShardHashes | None = None

    def take(self, stage: Stage) -> None:
        """Takes in a stage's record: the one that is there, or a new one."""
        directory = self.request.workspace / stage.name
        record = read_record(directory)
        identity = stage.identity(self.request, self.records, self.failures)
        if not stage.wanted(self.request):
            self._take_earlier(stage, record, identity)
        elif record is not None and not stage.always and self._still_good(stage, record, identity):
            self.reporter.line(f"{stage.name}: done before, kept")
            self.records[stage.name] = record
            self._take_failure(stage, directory, identity)
        else:
            self.records[stage.name] = self._made(stage, record, identity)

    def _still_good(self, stage: Stage, record: Record, identity: Mapping[str, Any]) -> bool:
        if record.identity != identity:
            if stage.renewed:
                return False
            raise StaleRunError(_stale(stage, record, identity, self.request))
        dropped = self.finished and not stage.optional  # OUT has what the run's folder has not
        return dropped or all((self.request.workspace / stage.name / name).is_file() for name in record.outputs)

    def _take_earlier(self, stage: Stage, record: Record | None, identity: Mapping[str, Any]) -> None:
        """An optional stage that is not asked for: what an earlier run found out about this checkpoint still counts."""
        directory = self.request.workspace / stage.name
        if record is not None and not stage.released:
            if _of_checkpoint(record.identity) == _of_checkpoint(identity):
                self.reporter.line(f"{stage.name}: done before, kept")
                self.records[stage.name] = record
            else:
                self.reporter.line(f"{stage.name}: recorded for other settings, not in the card (--{stage.name} does it anew)")
        self._take_failure(stage, directory, identity)

    def _take_failure(self, stage: Stage, directory: Path, identity: Mapping[str, Any]) -> None:
        if stage.optional and not stage.released and (directory / FAILED).is_file():
            failed = read_object(directory / FAILED)
            if _of_checkpoint(failed["identity"]) == _of_checkpoint(identity):
                self.failures[stage.name] = failed["summary"]

    def _made(self, stage: Stage, record: Record | None, identity: Mapping[str, Any]) -> Record:
        directory = self.request.workspace / stage.name
        _prepare(stage, directory, identity)
        checkpoint = self.request.out if self.finished else self.request.workspace / "assemble"
        context = Context(
            self.request,
            directory,
            dict(self.records),
            record,
            self.reporter,
            checkpoint,
            dict(self.failures),
            self.hashes.reached if self.hashes else lambda _: None,
        )
        reset_peak_memory()
        started = time.monotonic()
        try:
            if not stage.always:
                wait_until_imported()
            result = stage.run(context)
            _check_unchanged(stage, identity, self.request)
            if stage.settles and self.hashes:
                self.hashes.finish(self.reporter)
                _settle(self.request)
                self.records |= {name: r for name in self.records if (r := read_record(self.request.workspace / name))}
                identity = stage.identity(self.request, self.records, self.failures)
        except CheckFailedError as error:
            _check_unchanged(stage, identity, self.request)
            if stage.optional:
                write_object(directory / FAILED, {"identity": identity, "summary": error.summary, "text": str(error)})
            raise
        seconds = round(time.monotonic() - started, 3)
        outputs, facts, peak = dict(result.outputs), dict(result.facts), peak_memory_bytes()
        new = Record(stage.name, stage.version, fingerprint(identity), identity, outputs, facts, provenance(), seconds, peak)
        new.save(directory)
        (directory / FAILED).unlink(missing_ok=True)
        self.reporter.line(f"{stage.name}: done in {duration(seconds)}")
        return new


def _settle(request: Request) -> None:
    """Puts the hashes that are known into the records that were written before."""
    settle(request.workspace, FETCH.name, tuple(stage.name for stage in LATER))


def _of_checkpoint(identity: Mapping[str, Any]) -> dict[str, Any]:
    """What of an identity says which checkpoint, under which settings of the recipe; not with what it was looked at."""
    return {key: value for key, value in identity.items() if key not in ("asked", "used", "failed")}


def _prepare(stage: Stage, directory: Path, identity: Mapping[str, Any]) -> None:
    """Makes the stage's folder: empty, unless the stage goes on from what is there."""
    started = directory / STARTED
    same = stage.resumes and started.is_file() and read_object(started) == identity
    if not (stage.always or stage.renewed or same):
        shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(exist_ok=True)
    if stage.resumes:
        write_object(started, identity)


def _check_unchanged(stage: Stage, identity: Mapping[str, Any], request: Request) -> None:
    """Refuses what a stage made of the user's own text when that was changed meanwhile: the record would speak of another."""
    if changes := _changes(identity.get("asked", {}), dict(stage.asked(request))):
        raise InputError(
            f"{stage.name}: what it was given was changed while it was read:\n  {changes}\n"
            "Give the same command again when nothing writes to it."
        )


def _changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """The first fields that differ, a line each; empty when none does."""
    changes = list(difference(old, new))
    return "\n  ".join(changes[:12] + ([f"and {len(changes) - 12} more"] if len(changes) > 12 else []))


def _stale(stage: Stage, record: Record, identity: Mapping[str, Any], request: Request) -> str:
    shown = _changes(record.identity, identity)
    if stage.optional:
        return (
            f"{request.workspace / stage.name} holds a record that was made with other inputs:\n  {shown}\n"
            f"Either ask for the same again, or remove {request.workspace / stage.name} to do it anew."
        )
    return (
        f"{request.workspace} holds a run of something else; its stage {stage.name!r} was made with other inputs:\n  {shown}\n"
        f"Either ask for the same again, or start over: choose another OUT, or remove {request.workspace}"
        + (f" and {request.out}." if request.out.exists() else ".")
    )


@contextlib.contextmanager
def _locked(request: Request) -> Iterator[None]:
    """One process an OUT. The lock goes with the process, however it ends."""
    with (request.workspace / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise BusyError(f"another run is working in {request.workspace}. Wait for it, or choose another OUT.") from error
        yield
