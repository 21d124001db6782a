"""Shards are hashed while they are quantized: the records come out the same, and a run that was stopped goes on."""

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from blake3 import blake3

from assemble.errors import InputError
from quantize import hashing
from quantize.console import Reporter
from quantize.fingerprint import fingerprint
from quantize.hashing import ShardHashes
from quantize.runner import Outcome, StaleRunError, run
from quantize.stage import Record, Request, read_record
from quantize.streaming import engine
from recipes import loader

SHARDS = {"model/a.safetensors": b"first" * 999, "model/b.safetensors": b"second" * 999, "model/c.safetensors": b""}
UNHASHED = "not hashed yet"


class StoppedError(RuntimeError):
    """Not an error of the program's."""


@pytest.fixture
def record(tmp_path: Path) -> Record:
    """What `fetch` leaves of a model of three shards."""
    entries = {}
    for name, data in SHARDS.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
        entries[name] = {**hashing.stamp(path), "digest": ""}
    outputs = {name: hashing.label(entry) for name, entry in entries.items()}
    made = Record("fetch", 2, "", {}, outputs, {"model": {"root": str(tmp_path / "model")}, "hashed": entries}, {}, 0.0, 0)
    made.save(tmp_path)
    return made


@pytest.fixture
def no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page cache has no room for the shards."""
    monkeypatch.setattr(hashing, "available_memory_bytes", lambda: 0)


def hashed(directory: Path) -> dict[str, str]:
    """The digests on record."""
    kept = read_record(directory)
    assert kept
    digests = {name: entry["digest"] for name, entry in kept.facts["hashed"].items() if entry["digest"]}
    assert {name: label for name, label in kept.outputs.items() if UNHASHED not in label} == digests
    return digests


def test_all_are_hashed_at_once_when_there_is_room(record: Record, tmp_path: Path) -> None:
    with ShardHashes(record, tmp_path):
        while len(hashed(tmp_path)) < len(SHARDS):
            time.sleep(0.01)


@pytest.mark.usefixtures("no_room")
def test_all_are_hashed_in_the_end(record: Record, tmp_path: Path) -> None:
    with ShardHashes(record, tmp_path) as hashes:
        hashes.reached(tmp_path / "model/b.safetensors")
        hashes.reached(tmp_path / "model/b.safetensors")
        hashes.reached(tmp_path / "of/another.safetensors")
        hashes.finish(Reporter())
    assert hashed(tmp_path) == {name: f"blake3:{blake3(data).hexdigest()}" for name, data in SHARDS.items()}


@pytest.mark.usefixtures("no_room")
def test_what_was_hashed_before_the_work_failed_is_kept(
    record: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hashing, "PIECE", 64)
    with contextlib.suppress(StoppedError), ShardHashes(record, tmp_path) as hashes:
        hashes.reached(tmp_path / "model/b.safetensors")
        while not hashed(tmp_path):
            time.sleep(0.01)
        raise StoppedError
    assert list(hashed(tmp_path)) == ["model/b.safetensors"]


def test_the_work_that_failed_does_not_wait_for_a_large_shard(
    record: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hashing, "PIECE", 1)
    with contextlib.suppress(StoppedError), ShardHashes(record, tmp_path) as hashes:
        hashes.reached(tmp_path / "model/a.safetensors")
        raise StoppedError
    assert hashed(tmp_path) == {}


def test_the_hash_of_changed_bytes_is_not_kept(record: Record, tmp_path: Path) -> None:
    path = tmp_path / "model/b.safetensors"
    path.write_bytes(b"other")
    with (
        pytest.raises(InputError, match=r"b\.safetensors was changed while it was read"),
        ShardHashes(record, tmp_path) as hashes,
    ):
        hashes.finish(Reporter())
    assert path.name not in hashed(tmp_path)


def test_a_file_that_cannot_be_read(record: Record, tmp_path: Path) -> None:
    (tmp_path / "model/b.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"b\.safetensors"), ShardHashes(record, tmp_path) as hashes:
        hashes.finish(Reporter())


def test_shards_of_one_size_and_time_get_their_own_hashes(tmp_path: Path) -> None:
    entry = {"bytes": 5, "mtime_ns": 1, "ctime_ns": 1}
    hashed = {name: {**entry, "path": f"/{name}", "digest": name[-1]} for name in ("model/a", "model/b")}
    inputs = {"fetch": {name: hashing.label({**one, "digest": ""}) for name, one in hashed.items()}}
    for stage, facts, identity in (("fetch", {"hashed": hashed}, {}), ("plan", {}, {"inputs": inputs})):
        (tmp_path / stage).mkdir()
        Record(stage, 1, "", identity, {}, facts, {}, 0.0, 0).save(tmp_path / stage)
    hashing.settle(tmp_path, "fetch", ("plan",))
    settled = read_record(tmp_path / "plan")
    assert settled
    assert settled.identity == {"inputs": {"fetch": {"model/a": "a", "model/b": "b"}}}
    assert settled.fingerprint == fingerprint(settled.identity)


def records(out: Path) -> dict[str, dict]:
    return {path.parent.name: json.loads(path.read_text()) for path in out.with_name("out.run").glob("*/stage.json")}


def test_records_are_those_of_a_run_that_knew_the_hashes(
    tiny: Path, calibration: Path, quantized: Outcome, tmp_path: Path
) -> None:
    fetched = tmp_path / "out.run" / "fetch"
    shutil.copytree(quantized.out.with_name("out.run") / "fetch", fetched)
    run(Request(str(tiny), tmp_path / "out", loader.load("demo"), calibration=calibration, device="cpu"), Reporter())
    first, second = records(quantized.out), records(tmp_path / "out")
    assert UNHASHED not in json.dumps(first) + (quantized.out / "provenance.json").read_text()
    for name in ("fetch", "plan", "calibrate", "quantize", "assemble"):
        for field in ("identity", "fingerprint", "outputs"):
            assert first[name][field] == second[name][field], (name, field)
    for shard in tiny.glob("*.safetensors"):
        assert first["fetch"]["outputs"][f"model/{shard.name}"] == f"blake3:{blake3(shard.read_bytes()).hexdigest()}"


@pytest.fixture
def interrupted(
    tiny: Path, calibration: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[bool], tuple[Request, list[int]]]:
    """A function that stops a run before its third layer, its shards hashed by then or not.

    It returns what was asked for, and the list that the layers that are run from then on are noted in.
    """

    def interrupt(hashes_known: bool) -> tuple[Request, list[int]]:
        layers: list[int] = []
        measure = engine._Run._measure

        def noted(self: engine._Run, calibration: object, layer: int, *rest: object) -> None:
            layers.append(layer)
            measure(self, calibration, layer, *rest)

        def stopped(self: engine._Run, calibration: object, layer: int, *rest: object) -> None:
            if layer == 2:
                if hashes_known:
                    self._job.reached.__self__.finish(Reporter())  # it is a method of the run's ShardHashes
                raise StoppedError
            measure(self, calibration, layer, *rest)

        source = tmp_path / "model"
        shutil.copytree(tiny, source)
        request = Request(str(source), tmp_path / "out", loader.load("demo"), calibration=calibration, device="cpu")
        with monkeypatch.context() as patch:
            patch.setattr(engine, "SAVE_SECONDS", 0.0)
            patch.setattr(engine._Run, "_measure", stopped)
            if not hashes_known:
                patch.setattr(ShardHashes, "_hash", lambda _: None)
            with pytest.raises(StoppedError):
                run(request, Reporter())
        known = any(name.endswith(".safetensors") for name in hashed(tmp_path / "out.run" / "fetch"))
        assert known == hashes_known
        monkeypatch.setattr(engine._Run, "_measure", noted)
        return request, layers

    return interrupt


@pytest.mark.parametrize("hashes_known", [True, False])
def test_a_stopped_run_goes_on(interrupted: Callable, hashes_known: bool, quantized: Outcome) -> None:
    request, layers = interrupted(hashes_known)
    run(request, Reporter())
    assert layers == [2, 3]
    for path in quantized.out.glob("*.safetensors"):
        assert (request.out / path.name).read_bytes() == path.read_bytes()
    assert UNHASHED not in json.dumps(records(request.out))
    assert run(request, Reporter()).already_complete


def test_a_stopped_run_goes_on_when_only_times_changed(interrupted: Callable) -> None:
    request, layers = interrupted(True)
    for shard in Path(request.model).glob("*.safetensors"):
        os.utime(shard)
    run(request, Reporter())
    assert layers == [2, 3]


def test_a_stopped_run_is_refused_when_nobody_knows_whether_the_shard_is_the_same(interrupted: Callable) -> None:
    request, layers = interrupted(False)
    os.utime(Path(request.model) / "model-00001-of-00002.safetensors")
    with pytest.raises(StaleRunError, match=r"model-00001-of-00002\.safetensors, not hashed yet: .* -> .*, not hashed yet: "):
        run(request, Reporter())
    assert not layers


def test_a_stopped_run_is_refused_when_a_shard_changed(interrupted: Callable) -> None:
    request, layers = interrupted(True)
    shard = Path(request.model) / "model-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    with pytest.raises(StaleRunError, match=r"model-00001-of-00002\.safetensors: blake3:.* -> blake3:"):
        run(request, Reporter())
    assert not layers
