"""The engine: wherever the hidden states lie, however often it is stopped, however many processes take part, the same bytes."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from assemble.checkpoint import Checkpoint
from assemble.plan import AssemblyPlan
from quantize.console import Reporter
from quantize.planning import build_plan
from quantize.stages.quantize import Task, work
from quantize.streaming import engine
from quantize.streaming.activations import Store
from quantize.streaming.journal import open_journal, remove_leftovers
from quantize.streaming.ranks import Ranks
from quantize.streaming.writing import CoverageError, ShardSink
from recipes import loader

ROWS = np.random.default_rng(1).integers(0, 2048, (6, 48), dtype=np.int32)
SHARD_BYTES = 500_000  # several shards, also of the tiny model


def planned(root: Path, max_shard_bytes: int = SHARD_BYTES) -> AssemblyPlan:
    source = Checkpoint.open(root)
    return build_plan(loader.load("demo").recipe.model_copy(update={"max_shard_bytes": max_shard_bytes}), source, source)


def quantize(plan: AssemblyPlan, out: Path, store: Store = Store.HOST, save_seconds: float = 1e9) -> dict:
    out.mkdir(exist_ok=True)
    job = engine.Job(plan, "max", ROWS, 2, "cpu", store, out, save_seconds)
    journal = open_journal(out, job.states_bytes)
    remove_leftovers(journal)
    return engine.quantize(job, journal, Ranks(), Reporter())


def shards(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(out.glob("*.safetensors"))}


@pytest.fixture(scope="module", params=["tiny", "tiny_moe"])
def model(request: pytest.FixtureRequest) -> Path:
    root: Path = request.getfixturevalue(request.param)
    return root


@pytest.fixture(scope="module")
def made(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The shards of an undisturbed run."""
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    quantize(planned(model), out)
    return shards(out)


def test_every_planned_shard(model: Path, made: dict[str, bytes]) -> None:
    plan = planned(model)
    assert made.keys() == {shard.name for shard in plan.shards}
    assert len([s for s in plan.shards if s.quantized]) > 2


def test_hidden_states_on_the_disk(model: Path, made: dict[str, bytes], tmp_path: Path) -> None:
    quantize(planned(model), tmp_path / "out", Store.DISK)
    assert shards(tmp_path / "out") == made


class StoppedError(Exception):
    """What a test stops the engine with."""


@pytest.fixture
def stop_at(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stops the engine before it runs layer `layer`; None lets it through. Counts the layers that were run."""
    state, real = SimpleNamespace(layer=None, run=[]), engine.Calibration.run

    def run(self: engine.Calibration, layer: int, *arguments: object, last: bool) -> object:
        if layer == state.layer:
            raise StoppedError
        state.run.append(layer)
        return real(self, layer, *arguments, last=last)  # type: ignore[arg-type]

    monkeypatch.setattr(engine.Calibration, "run", run)
    return state


@pytest.mark.parametrize("layer", [1, 2, 3])
def test_goes_on_at_the_layer_where_it_stopped(
    layer: int, model: Path, made: dict[str, bytes], tmp_path: Path, stop_at: SimpleNamespace
) -> None:
    plan, out = planned(model), tmp_path / "out"
    stop_at.layer = layer
    with pytest.raises(StoppedError):
        quantize(plan, out, save_seconds=0)
    assert not list(out.glob("*.tmp"))
    assert [p.name for p in out.glob("hidden-*.bin")] == [f"hidden-{layer:04d}.bin"]
    finished = shards(out)
    stop_at.layer, stop_at.run = None, []
    facts = quantize(plan, out, save_seconds=0)
    assert stop_at.run == list(range(layer, 4))
    assert facts["layers_run"] == 4 - layer
    assert shards(out) == made
    assert finished.items() <= made.items()


def test_finished_shards_are_kept(model: Path, made: dict[str, bytes], tmp_path: Path, stop_at: SimpleNamespace) -> None:
    plan, out = planned(model), tmp_path / "out"
    stop_at.layer = 3
    with pytest.raises(StoppedError):
        quantize(plan, out)  # nothing saved: all layers are run again, but finished shards stay
    before = {path.name: path.stat().st_mtime_ns for path in out.glob("*.safetensors")}
    assert before
    stop_at.layer, stop_at.run = None, []
    quantize(plan, out)
    assert stop_at.run == [0, 1, 2, 3]
    assert shards(out) == made
    assert {name: (out / name).stat().st_mtime_ns for name in before} == before


def test_a_finished_shard_that_was_changed_since_is_made_again(
    model: Path, made: dict[str, bytes], tmp_path: Path, stop_at: SimpleNamespace
) -> None:
    plan, out = planned(model), tmp_path / "out"
    stop_at.layer = 3
    with pytest.raises(StoppedError):
        quantize(plan, out)
    shard = next(out / s.name for s in plan.shards if s.quantized and (out / s.name).is_file())
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    stop_at.layer = None
    quantize(plan, out)
    assert shards(out) == made


def test_a_torn_journal_costs_work_and_nothing_else(
    model: Path, made: dict[str, bytes], tmp_path: Path, stop_at: SimpleNamespace
) -> None:
    plan, out = planned(model), tmp_path / "out"
    stop_at.layer = 2
    with pytest.raises(StoppedError):
        quantize(plan, out, save_seconds=0)
    journal = out / "journal-0.json"
    journal.write_text(journal.read_text()[:40])
    stop_at.layer = None
    quantize(plan, out)
    assert shards(out) == made


def test_nothing_left_to_do(model: Path, made: dict[str, bytes], tmp_path: Path, stop_at: SimpleNamespace) -> None:
    quantize(planned(model), tmp_path / "out")
    stop_at.run = []
    facts = quantize(planned(model), tmp_path / "out")
    assert (stop_at.run, facts["layers_run"], facts["bytes_read"]) == ([], 0, 0)
    assert shards(tmp_path / "out") == made


PROCESS = """
import sys
from pathlib import Path
from quantize.streaming.worker import Silent, dismiss, follow
from quantize.streaming.ranks import find_ranks
from quantize.stages.quantize import Task, work
from recipes import loader

root, rows, out = map(Path, sys.argv[1:])
if find_ranks().rank:
    follow()
else:
    recipe = loader.load("demo").recipe
    recipe = recipe.model_copy(
        update={"max_shard_bytes": %d, "calibration": recipe.calibration.model_copy(update={"batch_size": 2})}
    )
    task = Task(root, root, recipe, rows, out, "cpu", "host")
    ranks = find_ranks()
    ranks.join()
    ranks.broadcast(task)
    digests, facts = work(task, Silent())
    assert len(facts["ranks"]) == 2 and all(r["bytes_read"] for r in facts["ranks"]), facts
    assert len(digests) == len(list(out.glob("*.safetensors")))
    dismiss()
threads = [name.read_text().strip() for name in Path("/proc/self/task").glob("*/comm")]
assert not [name for name in threads if "gloo" in name], threads  # with them, Python's end is an abort once in a while
"""


def test_two_processes(model: Path, made: dict[str, bytes], tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", ROWS)
    script, out = tmp_path / "process.py", tmp_path / "out"
    script.write_text(PROCESS % SHARD_BYTES)
    out.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    command += [str(model), str(tmp_path / "rows.npy"), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200, cwd=Path(__file__).parents[3])
    assert done.returncode == 0, done.stderr[-3000:]
    assert shards(out) == made  # whole batches are shared out, so even the input scales are the same


def test_the_stage_leaves_shards_a_log_and_its_journal(tiny: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", ROWS)
    out = tmp_path / "out"
    out.mkdir()
    task = Task(tiny, tiny, loader.load("demo").recipe, tmp_path / "rows.npy", out, "cpu", "disk")
    digests, facts = work(task, Reporter())
    assert {p.name for p in out.iterdir()} == {*digests, "log-0.txt", "journal-0.json"}
    assert facts["layers_run"] == 4
    again, facts = work(task, Reporter())  # as after a kill before the record was written
    assert (again, facts["layers_run"], facts["bytes_read"]) == (digests, 0, 0)


def test_a_tensor_of_another_shape_than_planned_is_refused(tiny: Path, tmp_path: Path) -> None:
    plan = planned(tiny)
    with ShardSink([s for s in plan.shards if s.quantized], tmp_path, lambda *_: None) as sink:
        name = "lm_head.weight_scale_2"
        with pytest.raises(CoverageError, match=r"lm_head\.weight_scale_2 became torch\.float32 \(1,\), planned F32 \(\)"):
            sink.write({name: torch.ones(1)})
        sink.write({name: torch.ones(())})
        with pytest.raises(CoverageError, match="not every planned module was quantized"):
            sink.finish()
    assert not list(tmp_path.iterdir())
