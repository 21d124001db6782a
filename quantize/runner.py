"""Runs the stages: skips what is done, refuses what changed, and lets OUT appear in one rename.

While a run works, everything lies in `OUT.run/`, one folder a stage. A stage is finished when its `stage.json` is there;
it is written last. A run that is killed is continued by the same command. When all stages are finished, the checkpoint
is collected by hard links and renamed to OUT, and the weights are dropped from `OUT.run/`; the records stay there.
"""

import contextlib
import fcntl
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from assemble.checkpoint import Checkpoint
from assemble.errors import InputError
from assemble.writer import link_file, sha256_file, sync_directory
from quantize.console import Reporter, duration
from quantize.fingerprint import difference, fingerprint
from quantize.machine import peak_memory_bytes, reset_peak_memory
from quantize.pipeline import PIPELINE
from quantize.planning import check_paths
from quantize.provenance import provenance
from quantize.stage import Context, Record, Request, Stage, read_record

COLLECTED = "collected"


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
    """
    check_paths(request)
    request.workspace.mkdir(parents=True, exist_ok=True)
    with _locked(request):
        finished = request.out.exists()
        if finished and read_record(request.workspace / PIPELINE[-1].name) is None:
            raise InputError(
                f"OUT {request.out} already exists, and the run in {request.workspace} is not finished. Move one away."
            )
        records: dict[str, Record] = {}
        for stage in PIPELINE:
            records[stage.name] = _run_stage(stage, request, records, reporter, finished=finished)
        if finished:
            _check_unchanged(request, records)
        else:
            _collect(request)
        _drop_weights(request)
        return Outcome(request.out, records, finished)


def _run_stage(stage: Stage, request: Request, records: dict[str, Record], reporter: Reporter, *, finished: bool) -> Record:
    directory = request.workspace / stage.name
    record = read_record(directory)
    identity = stage.identity(request.recipe.recipe, records)
    if record is not None and not stage.always:
        if record.identity != identity:
            raise StaleRunError(_stale(stage, record, identity, request))
        if finished or all((directory / name).is_file() for name in record.outputs):
            reporter.line(f"{stage.name}: done before, kept")
            return record
    if stage.always:
        directory.mkdir(exist_ok=True)
    else:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
    reset_peak_memory()
    started = time.monotonic()
    result = stage.run(Context(request, directory, {name: records[name] for name in records}, record, reporter))
    seconds = round(time.monotonic() - started, 3)
    facts = dict(result.facts)
    new = Record(
        stage.name,
        stage.version,
        fingerprint(identity),
        identity,
        dict(result.outputs),
        facts,
        provenance(),
        seconds,
        peak_memory_bytes(),
    )
    new.save(directory)
    reporter.line(f"{stage.name}: done in {duration(seconds)}")
    return new


def _stale(stage: Stage, record: Record, identity: dict[str, object], request: Request) -> str:
    changes = list(difference(record.identity, identity))
    shown = "\n  ".join(changes[:12] + ([f"and {len(changes) - 12} more"] if len(changes) > 12 else []))
    return (
        f"{request.workspace} holds a run of something else; its stage {stage.name!r} was made with other inputs:\n  {shown}\n"
        f"Either ask for the same again, or start over: choose another OUT, or remove {request.workspace}"
        + (f" and {request.out}." if request.out.exists() else ".")
    )


def _check_unchanged(request: Request, records: dict[str, Record]) -> None:
    """Refuses to call an OUT complete that was changed since: every file is there, shards are whole, the others' bytes agree.

    The shards' values are not read again; `python -m assemble verify OUT --deep --source MODEL` does that.
    """
    made = {**records["assemble"].outputs, **records["card"].outputs}
    shards = {shard.name for shard in Checkpoint.open(request.out).shards}
    for name, digest in made.items():
        path = request.out / name
        if not path.is_file() or (name not in shards and sha256_file(path) != digest):
            raise InputError(
                f"{path} is not what this run made: it was changed or removed since. Look with: python -m assemble verify "
                f"{request.out}. To make the checkpoint anew, remove it and give the same command."
            )


def _collect(request: Request) -> None:
    """Hard links the checkpoint's files into one folder and renames it to OUT."""
    collected = request.workspace / COLLECTED
    shutil.rmtree(collected, ignore_errors=True)
    collected.mkdir()
    for stage in ("assemble", "card"):
        record = read_record(request.workspace / stage)
        assert record is not None  # noqa: S101 - it was made or read a moment ago
        for name in record.outputs:
            link_file(request.workspace / stage / name, collected / name)
    sync_directory(collected)
    collected.rename(request.out)
    sync_directory(request.out.absolute().parent)


def _drop_weights(request: Request) -> None:
    """Removes what OUT now holds from the run's folder; the records and reports stay."""
    for path in request.workspace.glob("*/*.safetensors"):
        path.unlink()
    for path in request.workspace.glob("*/*.tmp"):
        path.unlink()
    shutil.rmtree(request.workspace / COLLECTED, ignore_errors=True)


@contextlib.contextmanager
def _locked(request: Request) -> Iterator[None]:
    """One process an OUT. The lock goes with the process, however it ends."""
    with (request.workspace / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise BusyError(f"another run is working in {request.workspace}. Wait for it, or choose another OUT.") from error
        yield
