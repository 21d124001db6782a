"""Nothing is lost: killed anywhere, interrupted, or out of disk, the next run finishes with the same bytes."""

import fcntl
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from assemble.checkpoint import Checkpoint
from assemble.errors import InputError
from quantize.console import Reporter
from quantize.modelopt_recipe import read_modelopt_recipe
from quantize.runner import BusyError, Outcome, StaleRunError, run
from quantize.stage import Request
from quantize.stages import fetch
from recipes import loader
from recipes.loader import LoadedRecipe

# How, before which of the matching actions, and where: in the order in which a run meets them, each going on from the last.
STOPS = [
    ("kill", 1, r"replace .*/fetch/stage\.json"),
    ("kill", 1, r"replace .*/plan/plan\.json"),
    ("kill", 1, r"replace .*/calibrate/stage\.json"),
    ("kill", 9, r"pwrite .*/quantize/model-00002.*\.tmp"),
    ("full", 9, r"pwrite .*/quantize/model-00002.*\.tmp"),
    ("kill", 1, r"replace .*/quantize/model-00002.*\.safetensors"),
    ("kill", 1, r"replace .*/quantize/hidden-0002\.bin"),
    ("kill", 20, r"pwrite .*/quantize/model-00001.*\.tmp"),
    ("full", 20, r"pwrite .*/quantize/model-00001.*\.tmp"),
    ("interrupt", 20, r"pwrite .*/quantize/model-00001.*\.tmp"),
    ("kill", 1, r"fsync .*/quantize/model-00001.*\.tmp"),
    ("kill", 1, r"replace .*/quantize/stage\.json"),
    ("kill", 1, r"replace .*/assemble/model\.safetensors\.index\.json"),
    ("kill", 1, r"replace .*/verify/stage\.json"),
    ("kill", 1, r"replace .*/card/stage\.json"),
    ("kill", 3, r"link .*/collected/"),
    ("kill", 1, r"rename .*/out$"),
    ("kill", 1, r"unlink .*/assemble/model-00002"),
]
# The same where the hashes of the shards go into the records: at the first, one of two is known.
STOPS_WHILE_HASHING = [
    ("kill", 3, r"replace .*/fetch/stage\.json"),
    ("kill", 2, r"replace .*/plan/stage\.json"),
    ("kill", 1, r"replace .*/calibrate/stage\.json"),
    ("kill", 1, r"replace .*/quantize/started\.json"),
    ("full", 1, r"fsync .*/quantize/stage\.json\.tmp"),
    ("kill", 1, r"replace .*/quantize/stage\.json"),
]
ENDS = {"kill": (-9, ""), "full": (1, "the disk is full"), "interrupt": (130, "interrupted")}


def start(how: str, count: int, pattern: str, model: Path, out: Path, calibration: Path) -> subprocess.CompletedProcess[str]:
    arguments = ["run", str(model), str(out), "--recipe", "demo", "--calibration", str(calibration), "--device", "cpu"]
    command = [sys.executable, "-m", "tests.quantize.interrupting", how, str(count), pattern, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])


def assert_same_checkpoint(out: Path, expected: Path) -> None:
    names = {p.name for p in expected.iterdir()}
    assert {p.name for p in out.iterdir()} == names
    for name in names - {"provenance.json", "README.md"}:  # they hold times and the checkpoint's name
        assert (out / name).read_bytes() == (expected / name).read_bytes(), name


@pytest.mark.parametrize("stops", [STOPS, STOPS_WHILE_HASHING], ids=["everywhere", "while hashing"])
def test_stopped(stops: list, tiny: Path, calibration: Path, quantized: Outcome, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for how, count, pattern in stops:
        done = start(how, count, pattern, tiny, out, calibration)
        code, text = ENDS[how]
        assert (done.returncode, text in done.stderr, "Traceback" in done.stderr) == (code, True, False), (pattern, done.stderr)
        assert out.exists() == pattern.startswith("unlink"), pattern
        if how != "kill":
            assert not list(tmp_path.glob("out.run/**/*.tmp"))
    done = start("kill", 1, "never", tiny, out, calibration)
    assert done.returncode == 0, done.stderr
    assert_same_checkpoint(out, quantized.out)
    assert not list(tmp_path.glob("out.run/**/*.safetensors"))
    assert not list(tmp_path.glob("out.run/**/*.tmp"))


@pytest.fixture
def finished(quantized: Outcome, tmp_path: Path) -> Path:
    """A copy of the finished run that a test may change; its OUT."""
    shutil.copytree(quantized.out, tmp_path / "out")
    shutil.copytree(quantized.out.with_name("out.run"), tmp_path / "out.run")
    return tmp_path / "out"


def changed(recipe: LoadedRecipe, **calibration: object) -> LoadedRecipe:
    new = recipe.recipe.calibration.model_copy(update=calibration)
    return LoadedRecipe(recipe.name, recipe.text, recipe.recipe.model_copy(update={"calibration": new}))


def test_another_recipe_is_refused_with_the_field(tiny: Path, calibration: Path, finished: Path) -> None:
    recipe = changed(loader.load("demo"), num_samples=8)
    with pytest.raises(StaleRunError) as refused:
        run(Request(str(tiny), finished, recipe, calibration=calibration, device="cpu"), Reporter())
    assert "calibration.num_samples: 16 -> 8" in str(refused.value)
    assert str(finished) in str(refused.value)


def test_a_modelopt_recipe_of_ones_own_that_says_another_algorithm_is_refused(
    tiny: Path, calibration: Path, tmp_path: Path
) -> None:
    """The name and what becomes of each tensor stay; the second run called the first one's result complete."""
    table = read_modelopt_recipe("huggingface/qwen3_5/ptq/w4a16_nvfp4_mse-fp8_attn-kv_fp8_cast")
    path, demo = tmp_path / "table.yaml", loader.load("demo")
    recipe = replace(demo, recipe=demo.recipe.model_copy(update={"modelopt": {"qwen3_5": str(path)}}))
    request = Request(str(tiny), tmp_path / "out", recipe, calibration=calibration, device="cpu")
    sweep = {"method": "mse", "fp8_scale_sweep": True}
    for algorithm in ({"method": "max"}, {"method": "max", "layerwise": {"enable": False}}, sweep):
        path.write_text(yaml.safe_dump({"quantize": {"algorithm": algorithm, "quant_cfg": [*map(dict, table.entries)]}}))
        read_modelopt_recipe.cache_clear()  # as a new process does
        if algorithm != sweep:
            run(request, Reporter())
    with pytest.raises(StaleRunError, match=r"inputs\.plan\.plan\.json"):
        run(request, Reporter())


def test_another_source_is_refused_with_the_file(tiny: Path, calibration: Path, finished: Path, tmp_path: Path) -> None:
    other = tmp_path / "model"
    shutil.copytree(tiny, other)
    chat = other / "chat_template.jinja"
    chat.write_text(chat.read_text() + "{# changed #}")
    with pytest.raises(StaleRunError, match=r"inputs\.fetch\.model/chat_template\.jinja"):
        run(Request(str(other), finished, loader.load("demo"), calibration=calibration, device="cpu"), Reporter())


def test_a_changed_source_with_its_old_time_is_noticed(tiny: Path, calibration: Path, finished: Path, tmp_path: Path) -> None:
    other = tmp_path / "model"
    shutil.copytree(tiny, other)
    request = Request(str(other), finished, loader.load("demo"), calibration=calibration, device="cpu")
    assert run(request, Reporter()).already_complete
    shard = other / "model-00001-of-00002.safetensors"
    times = shard.stat()
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(StaleRunError, match=r"inputs\.fetch\.model/model-00001-of-00002\.safetensors"):
        run(request, Reporter())


def test_another_source_of_the_same_sizes_and_times_is_noticed(
    tiny: Path, calibration: Path, finished: Path, tmp_path: Path
) -> None:
    """As of two models that are written together: a clock ticks every few milliseconds only."""
    name = "model-00001-of-00002.safetensors"
    first, second = tmp_path / "first", tmp_path / "second"
    for root in (first, second):
        shutil.copytree(tiny, root)
    data = bytearray((tiny / name).read_bytes())
    data[-1] ^= 1
    (second / name).write_bytes(data)
    while True:
        for root in (first, second):
            os.utime(root / name, ns=(0, 0))
        if len({(root / name).stat().st_ctime_ns for root in (first, second)}) == 1:
            break
    request = Request(str(first), finished, loader.load("demo"), calibration=calibration, device="cpu")
    assert run(request, Reporter()).already_complete
    with pytest.raises(StaleRunError, match=r"inputs\.fetch\.model/model-00001-of-00002\.safetensors"):
        run(replace(request, model=str(second)), Reporter())


class Rewriter(Reporter):
    """Changes a byte of a file, the last or another, when a stage is done."""

    def __init__(self, stage: str, path: Path, place: int = -1) -> None:
        super().__init__()
        self.stage, self.path, self.place = stage, path, place

    def line(self, text: str) -> None:
        if text.startswith(f"{self.stage}: done"):
            data = bytearray(self.path.read_bytes())
            data[self.place] ^= 1
            self.path.write_bytes(data)


def test_a_source_that_changes_while_it_is_read(tiny: Path, calibration: Path, tmp_path: Path) -> None:
    source, out = tmp_path / "model", tmp_path / "out"
    shutil.copytree(tiny, source)
    shard = source / "model-00001-of-00002.safetensors"
    request = Request(str(source), out, loader.load("demo"), calibration=calibration, device="cpu")
    with pytest.raises(InputError, match=r"model-00001-of-00002\.safetensors was changed while it was read"):
        run(request, Rewriter("calibrate", shard))
    assert not out.exists()


@pytest.mark.parametrize(
    ("name", "near"),
    [("chat_template.jinja", b"assistant"), ("config.json", b"e-06"), ("model-00002-of-00002.safetensors", b"")],
)
def test_a_source_that_changes_before_its_files_are_copied(
    name: str, near: bytes, tiny: Path, calibration: Path, tmp_path: Path
) -> None:
    """The shards are made by then. Side files are copied after that, and others than the record names would be."""
    source, out = tmp_path / "model", tmp_path / "out"
    shutil.copytree(tiny, source)
    request = Request(str(source), out, loader.load("demo"), calibration=calibration, device="cpu")
    with pytest.raises(InputError, match=rf"{name} was changed while it was read"):
        run(request, Rewriter("quantize", source / name, (tiny / name).read_bytes().rindex(near) + len(near) - 1))
    assert not out.exists()


def test_a_head_that_changes_while_it_is_read(tiny: Path, calibration: Path, tmp_path: Path) -> None:
    """Its tensors were hashed for the record, and others would be copied: the record would name what OUT does not have."""
    head, out = tmp_path / "head", tmp_path / "out"
    shutil.copytree(tiny, head)
    shard = Checkpoint.open(head)["mtp.fc.weight"].shard
    request = Request(str(tiny), out, loader.load("demo"), mtp_from=str(head), calibration=calibration, device="cpu")
    with pytest.raises(InputError, match=rf"head/{shard} was changed while it was read"):
        run(request, Rewriter("calibrate", head / shard))
    assert not out.exists()


def test_calibration_data_that_change_while_they_are_read(tiny: Path, calibration: Path, tmp_path: Path) -> None:
    text, out = tmp_path / "text.jsonl", tmp_path / "out"
    shutil.copy(calibration, text)
    request = Request(str(tiny), out, loader.load("demo"), calibration=text, device="cpu")
    with pytest.raises(InputError, match=r"text\.jsonl was changed while it was read"):
        run(request, Rewriter("plan", text, text.read_bytes().index(b"return")))
    assert not out.exists()


@pytest.mark.parametrize("when", ["while the stage goes on", "after it"])
def test_a_shard_that_changes_after_it_was_hashed(
    when: str, tiny: Path, calibration: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    shard = tmp_path / "out.run" / "quantize" / "model-00001-of-00002.safetensors"
    request = Request(str(tiny), out, loader.load("demo"), calibration=calibration, device="cpu")
    reporter: Reporter = Rewriter("quantize", shard)
    with monkeypatch.context() as patch:
        if when == "while the stage goes on":
            patch.setattr(fetch, "check_unchanged", lambda _, rewriter=reporter: rewriter.line("quantize: done"))
            reporter = Reporter()
        with pytest.raises(InputError, match=r"00001-of-00002\.safetensors was changed after it was written"):
            run(request, reporter)
    assert not out.exists()
    shutil.rmtree(tmp_path / "out.run")
    assert run(request, Reporter()).out == out


def test_a_moved_source_is_the_same_source(tiny: Path, calibration: Path, finished: Path, tmp_path: Path) -> None:
    other = tmp_path / "moved"
    shutil.copytree(tiny, other)
    assert run(
        Request(str(other), finished, loader.load("demo"), calibration=calibration, device="cpu"), Reporter()
    ).already_complete


def test_a_damaged_stage_is_made_again(tiny: Path, calibration: Path, quantized: Outcome, finished: Path) -> None:
    shutil.rmtree(finished)  # the weights are gone from the run's folder too: quantize and assemble run again
    outcome = run(Request(str(tiny), finished, loader.load("demo"), calibration=calibration, device="cpu"), Reporter())
    assert not outcome.already_complete
    assert_same_checkpoint(finished, quantized.out)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model-00001-of-00002.safetensors", "README.md"])
@pytest.mark.parametrize("gone", [True, False])
def test_a_changed_out_is_not_called_complete(name: str, gone: bool, tiny: Path, calibration: Path, finished: Path) -> None:
    path = finished / name
    data = path.read_bytes()
    path.unlink()
    if not gone:
        path.write_bytes(data[:-1] + b" ")
        if name.endswith(".safetensors"):
            path.write_bytes(data[:-1])
    with pytest.raises(InputError, match=name):
        run(Request(str(tiny), finished, loader.load("demo"), calibration=calibration, device="cpu"), Reporter())


def test_two_runs_on_one_out(tiny: Path, calibration: Path, finished: Path) -> None:
    with (finished.with_name("out.run") / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(BusyError, match="another run is working"):
            run(Request(str(tiny), finished, loader.load("demo"), calibration=calibration, device="cpu"), Reporter())
