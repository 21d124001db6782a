"""Whatever goes wrong in one of the engine's threads ends the run soon, with that error, and leaves nothing half-written."""

import errno
import gc
import hashlib
import os
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from assemble.checkpoint import Checkpoint
from assemble.writer import ShardWriter
from quantize.streaming import activations, engine, reading
from quantize.streaming.activations import Activations, Store
from quantize.streaming.decoder import Decoder
from quantize.streaming.journal import open_journal
from quantize.streaming.ranks import Ranks
from quantize.streaming.worker import Silent
from quantize.streaming.writing import ShardSink
from tests.quantize.streaming.test_engine import ROWS, planned, quantize, shards

FULL = OSError(errno.ENOSPC, "No space left on device")


def full(*_: object, **__: object) -> None:
    raise FULL


def fails_in(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, when: object = None) -> None:
    """Makes a function meet a full disk, on calls for which `when` is true."""
    real = getattr(owner, name)

    def call(*arguments: object, **named: object) -> object:
        if when is None or when(*arguments):  # type: ignore[operator]
            raise FULL
        return real(*arguments, **named)

    monkeypatch.setattr(owner, name, call)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("where", ["open", "write", "fsync", "journal", "copy", "hidden states", "read"])
def test_a_full_disk_anywhere(where: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, out = planned(tiny), tmp_path / "out"
    quantized = {shard.name for shard in plan.shards if shard.quantized}
    with monkeypatch.context() as patch:
        match where:
            case "open":
                fails_in(
                    patch, ShardWriter, "__init__", lambda _self, path, _t: path.name == "model-00002-of-" + path.name[-17:]
                )
            case "write":
                fails_in(patch, ShardWriter, "write", lambda writer, *_: writer.path.name in quantized)
            case "fsync":
                fails_in(patch, ShardWriter, "commit", lambda writer: writer.path.name in quantized)
            case "journal":
                fails_in(patch, engine.Journal, "shard_finished")
            case "copy":
                fails_in(patch, ShardWriter, "write", lambda writer, *_: writer.path.name not in quantized)
            case "hidden states":
                fails_in(patch, activations.os, "fsync")
            case "read":
                fails_in(patch, os, "preadv")
        with pytest.raises(OSError, match="No space left") as caught:
            quantize(plan, out, save_seconds=0 if where == "hidden states" else 1e9)
    assert caught.value.errno == errno.ENOSPC
    assert not list(out.glob("*.tmp"))
    quantize(plan, out)
    assert shards(out).keys() == {shard.name for shard in plan.shards}


def test_a_full_disk_ends_the_run_at_the_next_layer(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when no later layer has anything to write: all that is wanted here is lm_head's shard and the layers' input."""
    plan, out = planned(tiny, 10**9), tmp_path / "out"
    quantize(plan, out)
    for path in out.glob("model-00001-*"):
        path.unlink()
    (out / "journal-0.json").unlink()
    run: list[int] = []
    real = engine.Calibration.run

    def counted(self: engine.Calibration, layer: int, *arguments: object, last: bool) -> object:
        run.append(layer)
        time.sleep(0.3)  # the disk's thread has met its error by the end of the layer
        return real(self, layer, *arguments, last=last)  # type: ignore[arg-type]

    monkeypatch.setattr(engine.Calibration, "run", counted)
    monkeypatch.setattr(ShardSink, "write", lambda sink, *_: sink._waiting or sink._waiting.append(sink._disk.submit(full)))
    with pytest.raises(OSError, match="No space left"):
        quantize(plan, out)
    assert run in ([], [0])


def test_hidden_states_on_a_full_disk_are_refused_before_they_are_written(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mapped file without blocks would kill the process at the first write beyond the disk's end (SIGBUS)."""
    taken: list[int] = []
    real = os.posix_fallocate
    monkeypatch.setattr(os, "posix_fallocate", lambda fd, start, size: (taken.append(size), real(fd, start, size)))
    path = tmp_path / "activations-0.bin"
    states = Activations((6, 48, 64), 2, torch.device("cpu"), Store.DISK, path)
    assert taken == [6 * 48 * 64 * 2]
    assert not path.exists()  # its room is given back whenever the process ends, and however
    states.put(slice(0, 2), torch.ones(2, 48, 64, dtype=torch.bfloat16))
    assert [float(b.float().sum()) for b, _ in states.batches()] == [2 * 48 * 64, 0, 0]
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        Activations((6, 48, 64), 2, torch.device("cpu"), Store.DISK, path)
    assert not path.exists()


def test_saved_hidden_states_take_no_room_that_the_shards_need(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, saved = planned(tiny), []
    monkeypatch.setattr(engine.Journal, "states_saved", lambda _self, layer, _amax: saved.append(layer))
    states_bytes = ROWS.size * 2 * int(plan.architecture.text["hidden_size"])
    monkeypatch.setattr(engine, "free_disk_bytes", lambda _path: states_bytes)
    quantize(plan, tmp_path / "little", save_seconds=0)
    assert saved == []
    monkeypatch.setattr(engine, "free_disk_bytes", lambda _path: plan.nbytes + states_bytes + 1)
    quantize(plan, tmp_path / "enough", save_seconds=0)
    assert saved == [1, 2, 3]


@pytest.mark.parametrize("store", [Store.HOST, Store.DISK])
def test_a_rank_without_rows(store: Store, tmp_path: Path) -> None:
    states = Activations((0, 48, 64), 2, torch.device("cpu"), store, tmp_path / "activations-1.bin")
    whole = tmp_path / "hidden-0001.bin"
    whole.write_bytes(bytes(2 * 48 * 64 * 2))
    states.save(whole, Ranks(1, 2))
    states.restore(whole, Ranks(1, 2))
    assert list(states.batches()) == []
    assert whole.stat().st_size == 2 * 48 * 64 * 2


def test_ctrl_c_while_much_is_queued(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*_: object) -> None:
        time.sleep(0.2)

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ShardSink, "_put", slow)
    monkeypatch.setattr(engine.Calibration, "run", interrupted)
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        quantize(planned(tiny), tmp_path / "out")
    assert time.monotonic() - started < 5
    assert not list((tmp_path / "out").glob("*.tmp"))


def test_two_groups_are_in_memory_at_most(tiny_moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the garbage collector: no cycle, closure or module keeps a layer that is done."""
    buffers: list[weakref.ref[torch.Tensor]] = []
    most: list[int] = []
    start, step = reading.Reader.start, engine._Run._step

    def noted(self: reading.Reader, group: reading.Group) -> reading.Reading:
        made = start(self, group)
        assert made.buffer is not None
        buffers.append(weakref.ref(made.buffer))
        return made

    def counted(self: engine._Run, *arguments: object) -> None:
        most.append(sum(buffer() is not None for buffer in buffers))
        step(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(reading.Reader, "start", noted)
    monkeypatch.setattr(engine._Run, "_step", counted)
    gc.disable()
    try:
        quantize(planned(tiny_moe), tmp_path / "out")
    finally:
        gc.enable()
    assert most == [2, 2, 2, 2, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_embeddings_of_any_dtype(dtype: torch.dtype, tiny: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    plan = planned(tiny)
    name = f"{plan.architecture.prefix}embed_tokens.weight"
    table = reading.read_tensor(plan.source, name)
    for file in tiny.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "model.safetensors.index.json").unlink(missing_ok=True)
    save_file({name: table.to(dtype).contiguous()}, tmp_path / "model.safetensors")
    decoder = Decoder(plan.architecture, "cpu")

    def embedded(source: Checkpoint) -> torch.Tensor:
        states = Activations((*ROWS.shape, decoder.hidden_size), 2, decoder.device, Store.HOST, tmp_path / "unused")
        states.embed(decoder, source, name, ROWS)
        return torch.cat([batch.clone() for batch, _ in states.batches()])

    assert torch.equal(embedded(Checkpoint.open(tmp_path)), embedded(plan.source).to(dtype).bfloat16())


def test_the_other_processes_say_nothing_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes that for a terminal
    silent = Silent()
    silent.line("a line")
    with silent.task("quantize", 10) as advance:
        advance(5, "layer 1 of 2")
    assert capsys.readouterr() == ("", "")


def test_hidden_states_of_another_size_are_not_taken(tiny: Path, tmp_path: Path) -> None:
    journal = open_journal(tmp_path, 100)
    journal.states_path(3).write_bytes(bytes(99))
    journal.states_saved(3, {"a": 1.0})
    assert open_journal(tmp_path, 100).next_layer == 0
    assert open_journal(tmp_path, 99).next_layer == 3


def test_the_furthest_of_several_journals_counts(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"").hexdigest()
    for rank, layer in ((0, 5), (1, 3)):
        journal = open_journal(tmp_path, 10, rank)
        journal.next_layer, journal.input_amax = layer, {"module": float(layer)}
        (tmp_path / f"shard-{rank}").touch()
        journal.shard_finished(f"shard-{rank}", digest)
        journal.states_path(layer).write_bytes(bytes(10))
    found = open_journal(tmp_path, 10)
    assert (found.next_layer, found.input_amax) == (5, {"module": 5.0})
    assert found.shards == {"shard-0": digest, "shard-1": digest}


def test_saved_states_are_the_same_for_any_number_of_ranks(tmp_path: Path) -> None:
    rows = torch.arange(7 * 2 * 3).view(7, 2, 3).bfloat16()
    for count in (1, 2, 3, 5):
        path = tmp_path / f"of-{count}"
        for rank in range(count):
            own = np.concatenate([np.arange(7)[i : i + 2] for i in range(0, 7, 2)][rank::count] or [np.arange(0)])
            states = Activations((len(own), 2, 3), 2, torch.device("cpu"), Store.HOST, path)
            for start in range(0, len(own), 2):
                states.put(slice(start, start + 2), rows[own[start : start + 2]])
            states.save(path, Ranks(rank, count))
            other = Activations((len(own), 2, 3), 2, torch.device("cpu"), Store.HOST, path)
            if count > 1:
                other.restore(tmp_path / "of-1", Ranks(rank, count))
                assert all(torch.equal(a, b) for (a, _), (b, _) in zip(states.batches(), other.batches(), strict=True))
        assert path.read_bytes() == (tmp_path / "of-1").read_bytes()
