"""`repair`: each fault, mended, verifies clean and equals the checkpoint before it was broken."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from assemble.__main__ import app
from assemble.checkpoint import INDEX, Checkpoint
from assemble.dequantize import dequantize_nvfp4
from assemble.mend import swap
from assemble.writer import sha256_file
from quantize.runner import Outcome
from tests.assemble import faults
from tests.assemble.repairs import Editable, Raw, quantize_moe, tensors_of, write_moe


def run(*arguments: object) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, json.loads(result.stdout) if result.stdout.startswith("{") else {"error": result.stderr}


def state(root: Path) -> dict[str, tuple[int, int, bytes]]:
    """Every file of a directory: inode, modification time, content."""
    return {p.name: (p.stat().st_ino, p.stat().st_mtime_ns, p.read_bytes()) for p in sorted(root.iterdir())}


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """fsync is for power cuts, which no test makes, and most of the time that a small repair takes."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture
def copy(quantized: Outcome, tmp_path: Path) -> Path:
    return Path(shutil.copytree(quantized.out, tmp_path / "checkpoint"))


@pytest.fixture(scope="session")
def sound(quantized: Outcome) -> dict[str, Raw]:
    return tensors_of(quantized.out)


@pytest.fixture(scope="session")
def moe(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("moe")
    source = write_moe(root / "source", tiny)
    return source, quantize_moe(source, root / "quantized")


def check_equal(made: Path, expected: dict[str, Raw], unbroken: Path) -> None:
    """Same tensors and same configs as the unbroken checkpoint; a true index."""
    tensors = tensors_of(made)
    assert tensors.keys() == expected.keys()
    assert [n for n in tensors if tensors[n] != expected[n]] == []
    for name in ("config.json", "hf_quant_config.json"):
        assert json.loads((made / name).read_text()) == json.loads((unbroken / name).read_text()), name
    index = json.loads((made / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(len(raw[2]) for raw in expected.values())
    assert index["weight_map"].keys() == expected.keys()
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json", "tokenizer_config.json"):
        assert (made / name).read_bytes() == (unbroken / name).read_bytes()


CASES = [
    *((name, faults.CONFIG, False) for name in faults.CONFIG),
    *((name, faults.FILES, False) for name in faults.FILES),
    *((name, faults.SOURCE, True) for name in faults.SOURCE),
]


@pytest.mark.parametrize(("fault", "table", "with_source"), CASES, ids=[c[0] for c in CASES])
def test_a_mended_checkpoint_equals_the_unbroken_one(
    fault: str, table: dict, with_source: bool, copy: Path, sound: dict, quantized: Outcome, tiny: Path, tmp_path: Path
) -> None:
    faults.break_it(copy, fault, table, Checkpoint.open(tiny))
    before = state(copy)
    source = ("--source", tiny) if with_source else ()
    code, report = run("repair", copy, "--out", tmp_path / "mended", *source)
    assert state(copy) == before
    assert report["mended"], report
    assert report["unmended"] == []
    assert report["verified"]["ok"], report["verified"]["findings"]
    assert code == 0
    check_equal(tmp_path / "mended", sound, quantized.out)
    code, again = run("repair", tmp_path / "mended", "--dry-run", *source)
    assert (code, again["nothing_to_do"]) == (0, True), again["mended"]


@pytest.mark.parametrize("fault", faults.UNMENDABLE)
def test_what_cannot_be_mended_is_named_and_kept(fault: str, copy: Path, tiny: Path, tmp_path: Path) -> None:
    faults.break_it(copy, fault, faults.UNMENDABLE, Checkpoint.open(tiny))
    faulty = Editable.open(copy) if fault != "shard cut off" else None
    code, report = run("repair", copy, "--dry-run")
    assert code == 1
    assert report["unmended"]
    assert report["out"] is None
    code, report = run("repair", copy, "--out", tmp_path / "mended")
    assert code == 1
    if faulty and report["out"]:
        stored = [(n, raw) for tensors in Editable.open(tmp_path / "mended").shards.values() for n, raw in tensors.items()]
        assert stored == [(n, raw) for tensors in faulty.shards.values() for n, raw in tensors.items()]


def test_both_copies_of_a_doubled_tensor_stay_while_other_faults_are_mended(copy: Path, tiny: Path, tmp_path: Path) -> None:
    edited = Editable.open(copy)
    faults.UNMENDABLE["norm stored twice, different"](edited, Checkpoint.open(tiny))
    edited.q.pop("ignore")
    edited.save()
    code, report = run("repair", copy, "--out", tmp_path / "mended")
    assert code == 1
    assert [n["where"] for n in report["unmended"]] == ["model.language_model.layers.2.input_layernorm.weight"]
    assert Editable.open(tmp_path / "mended").shards == edited.shards
    assert "ignore" in json.loads((tmp_path / "mended" / "config.json").read_text())["quantization_config"]


def test_dry_run_and_nothing_to_do_write_nothing(copy: Path, tiny: Path, tmp_path: Path) -> None:
    before = state(copy)
    for place in (("--in-place",), ("--dry-run",), ("--out", tmp_path / "new")):
        code, report = run("repair", copy, "--source", tiny, *place)
        assert (code, report["nothing_to_do"], report["out"], report["verified"]["ok"]) == (0, True, None, True)
    faults.break_it(copy, "head changed", faults.SOURCE, Checkpoint.open(tiny))
    broken = state(copy)
    code, report = run("repair", copy, "--source", tiny, "--dry-run")
    assert (code, len(report["mended"])) == (0, 1)
    assert state(copy) == broken
    assert before.keys() == broken.keys()
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint"]


def test_in_place_keeps_the_old_json_and_writes_through_no_link(
    copy: Path, sound: dict, quantized: Outcome, tiny: Path, tmp_path: Path
) -> None:
    edited = Editable.open(copy)
    faults.SOURCE["embedding changed"](edited, Checkpoint.open(tiny))
    edited.q["ignore"].append("*")
    edited.save()
    (copy / "figures").mkdir()
    (copy / "figures" / "one.txt").write_text("kept")
    elsewhere = Path(shutil.copytree(copy, tmp_path / "elsewhere", copy_function=os.link))
    before, old = state(elsewhere / "figures"), {p.name: p.read_bytes() for p in elsewhere.iterdir() if p.is_file()}
    code, report = run("repair", copy, "--source", tiny, "--in-place")
    assert (code, report["verified"]["ok"]) == (0, True)
    check_equal(copy, sound, quantized.out)
    assert (copy / "config.json.before-repair").read_bytes() == old["config.json"]
    assert {p.name: p.read_bytes() for p in elsewhere.iterdir() if p.is_file()} == old
    assert state(copy / "figures") == before
    assert (copy / faults.FIRST).samefile(elsewhere / faults.FIRST)
    assert not (copy / faults.SECOND).samefile(elsewhere / faults.SECOND)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint", "elsewhere"]
    edited = Editable.open(copy)
    edited.config["dtype"] = "float16"
    edited.save()
    run("repair", copy, "--in-place")
    assert (copy / "config.json.before-repair").read_bytes() == old["config.json"]
    assert json.loads((copy / "config.json.before-repair-1").read_text())["dtype"] == "float16"


def test_a_snapshot_of_a_cache_is_mended(quantized: Outcome, tmp_path: Path) -> None:
    cache = tmp_path / "models--org--name"
    (cache / "blobs").mkdir(parents=True)
    root = cache / "snapshots" / "revision"
    root.mkdir(parents=True)
    for path in quantized.out.iterdir():
        shutil.copyfile(path, cache / "blobs" / f"blob-{path.name}")
        (root / path.name).symlink_to(f"../../blobs/blob-{path.name}")
    config = json.loads((root / "config.json").read_text()) | {"dtype": "float16"}
    (cache / "blobs" / "blob-config.json").write_text(json.dumps(config))
    blob = cache / "blobs" / f"blob-{faults.FIRST}"
    assert run("repair", root, "--out", tmp_path / "new")[0] == 0
    assert (tmp_path / "new" / faults.FIRST).samefile(blob)
    assert not (tmp_path / "new" / faults.FIRST).is_symlink()
    assert run("repair", root, "--in-place")[0] == 0
    assert (root / faults.FIRST).is_symlink()
    assert json.loads((root / "config.json").read_text())["dtype"] == "bfloat16"
    assert json.loads((cache / "blobs" / "blob-config.json").read_text()) == config


def test_a_source_of_another_size_is_refused(copy: Path, tiny: Path, moe: tuple[Path, Path], tmp_path: Path) -> None:
    small = write_moe(tmp_path / "small", tiny, hidden_size=64)
    deep = write_moe(tmp_path / "deep", tiny, num_hidden_layers=3, layer_types=["linear_attention"] * 2 + ["full_attention"])
    for checkpoint, source, why in (
        (moe[1], small, "differ in shape"),
        (moe[1], deep, "3 layers there, 2 here"),
        (copy, moe[0], "another model"),
        (copy, copy, "is quantized"),
        (tiny, tiny, "holds no quantized weight"),
    ):
        code, report = run("repair", checkpoint, "--source", source, "--dry-run")
        assert code == 2, (checkpoint, source)
        assert why in report["error"]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([], "Say where"),
        (["--in-place", "--dry-run"], "Say where"),
        (["--out", "{tmp}/checkpoint"], "not empty"),
        (["--out", "{tmp}/no/where"], "not a directory"),
    ],
)
def test_where_the_result_goes_must_be_clear(arguments: list[str], why: str, copy: Path, tmp_path: Path) -> None:
    code, report = run("repair", copy, *(a.format(tmp=tmp_path) for a in arguments))
    assert code == 2
    assert why in report["error"]


def test_without_the_source_scales_are_moved_and_the_error_is_stated(
    copy: Path, tiny: Path, sound: dict, tmp_path: Path
) -> None:
    faults.break_it(copy, "gate and up of different scales", faults.SOURCE, Checkpoint.open(tiny))
    faulty = tensors_of(copy)
    code, report = run("repair", copy, "--out", tmp_path / "mended")
    assert (code, report["verified"]["ok"]) == (0, True)
    mended = tensors_of(tmp_path / "mended")
    gate, up = f"{faults.MLP}.gate_proj", f"{faults.MLP}.up_proj"
    assert mended[f"{gate}.weight_scale_2"] == mended[f"{up}.weight_scale_2"]
    changed = {n for n in mended if mended[n] != faulty[n]}
    assert len({n.rpartition(".")[0] for n in changed}) == 1  # only the member with the smaller scale
    (module,) = {n.rpartition(".")[0] for n in changed}
    before, after = (_values(tensors, module) for tensors in (faulty, mended))
    stated = float(report["statements"][0].split("changed by ")[1].split(" %")[0]) / 100
    measured = np.linalg.norm(after - before) / np.linalg.norm(before)
    assert stated == pytest.approx(measured, rel=0.01)
    assert 0 < measured < 0.07
    largest = np.abs(before).reshape(-1, 16).max(axis=1)
    assert np.all(np.abs(after - before).reshape(-1, 16).max(axis=1) <= largest * 0.17)


def _values(tensors: dict[str, Raw], module: str) -> np.ndarray:
    (_, (rows, half), weight), (_, _, scales) = tensors[f"{module}.weight"], tensors[f"{module}.weight_scale"]
    packed = np.frombuffer(weight, np.uint8).reshape(rows, half)
    blocks = np.frombuffer(scales, np.uint8).reshape(rows, half // 8)
    scale = np.frombuffer(tensors[f"{module}.weight_scale_2"][2], np.float32)[0]
    return dequantize_nvfp4(packed, blocks, float(scale)).astype(np.float64)


def test_a_listed_bf16_lm_head_can_be_unlisted_instead(copy: Path, tiny: Path, tmp_path: Path) -> None:
    source = Checkpoint.open(tiny)
    faults.break_it(copy, "listed lm_head stored BF16", faults.FILES, source)
    before = tensors_of(copy)
    code, report = run("repair", copy, "--out", tmp_path / "mended", "--unlist")
    assert (code, report["verified"]["ok"]) == (0, True)
    assert tensors_of(tmp_path / "mended") == before
    for name in ("config.json", "hf_quant_config.json"):
        text = json.loads((tmp_path / "mended" / name).read_text())
        assert "lm_head" not in (text.get("quantization_config") or text["quantization"])["quantized_layers"]


MOE_EXPERT = "model.layers.1.mlp.experts.2"
MOE_FAULTS = {
    "expert lost": lambda e: [e.drop(n) for n in list(e.shards[faults.FIRST]) if n.startswith(MOE_EXPERT)],
    "one scale of an expert lost": lambda e: e.drop(f"{MOE_EXPERT}.down_proj.weight_scale_2"),
    "gate scale of an expert differs": lambda e: e.put(
        f"{MOE_EXPERT}.gate_proj.weight_scale_2", ("F32", (), np.float32(1e-4).tobytes())
    ),
    "shared expert's weight lost": lambda e: e.drop("model.layers.0.mlp.shared_expert.up_proj.weight"),
    "container not listed": lambda e: e.q["quantized_layers"].pop("model.layers.0.mlp.experts"),
    "ignore hits the shared expert": lambda e: e.q["ignore"].append("model.layers.0.mlp.shared_expert*"),
    "ignore hits the experts": lambda e: e.q["ignore"].append("*.experts*"),
    "router changed": lambda e: faults._flip(e, "model.layers.0.mlp.gate.weight"),
    "head lost": lambda e: [e.drop(n) for n in list(e.shards[faults.SECOND]) if n.startswith("mtp.")],
    "head in two layouts": lambda e: e.put(
        "mtp.layers.0.mlp.experts.0.gate_proj.weight", ("BF16", (64, 128), bytes(64 * 128 * 2))
    ),
}


@pytest.mark.parametrize("fault", MOE_FAULTS)
def test_a_mixture_of_experts_is_mended(fault: str, moe: tuple[Path, Path], tmp_path: Path) -> None:
    source, whole = moe
    root = Path(shutil.copytree(whole, tmp_path / "checkpoint"))
    edited = Editable.open(root)
    MOE_FAULTS[fault](edited)
    edited.save()
    code, report = run("repair", root, "--source", source, "--out", tmp_path / "mended")
    assert report["verified"]["ok"], report["verified"]["findings"]
    assert (code, report["unmended"]) == (0, [])
    check_equal(tmp_path / "mended", tensors_of(whole), whole)


def test_killed_at_any_step_it_is_the_old_checkpoint_or_the_new_one(moe: tuple[Path, Path], tmp_path: Path) -> None:
    root = Path(shutil.copytree(moe[1], tmp_path / "broken"))
    edited = Editable.open(root)
    MOE_FAULTS["gate scale of an expert differs"](edited)
    edited.q["ignore"].append("*")
    edited.save()
    steps = kills(root, tmp_path / "exchange", "exchange", 1, "repair", "--in-place")
    assert steps > 40
    # Until the swap the two ways are the same.
    assert kills(root, tmp_path / "renames", "renames", steps - 25, "repair", "--in-place") > 25


def kills(root: Path, work: Path, mode: str, first: int, *arguments: object) -> int:
    """Runs `tests.assemble.crash`; the number of kills that it survived."""
    command = [sys.executable, "-m", "tests.assemble.crash", *map(str, (root, work, mode, first, *arguments))]
    result = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False)
    assert result.returncode == 0, result.stderr
    return int(result.stdout)


def test_the_new_directory_may_lie_in_the_old_one(copy: Path, tiny: Path) -> None:
    faults.break_it(copy, "no dtype", faults.CONFIG, Checkpoint.open(tiny))
    before = {p.name for p in copy.iterdir()}
    assert run("repair", copy, "--out", copy / "mended")[0] == 0
    assert {p.name for p in copy.iterdir()} == before | {"mended"}
    assert {p.name for p in (copy / "mended").iterdir()} == before


def test_what_verification_finds_is_told_when_there_is_nothing_to_mend(copy: Path, tiny: Path) -> None:
    faults.break_it(copy, "block scale NaN", faults.SOURCE, Checkpoint.open(tiny))
    code, report = run("repair", copy, "--in-place")  # a NaN is in the values, which only --source makes it read
    assert (code, report["nothing_to_do"], report["verified"]["ok"]) == (0, True, True)
    faults.break_it(copy, "input scale of o_proj lost", faults.UNMENDABLE, Checkpoint.open(tiny))
    code, report = run("repair", copy, "--in-place")
    assert (code, report["nothing_to_do"], report["verified"]["ok"]) == (1, True, False)
    assert report["out"] is None


def test_the_record_states_no_digest_that_is_not_true(copy: Path, tiny: Path, quantized: Outcome, tmp_path: Path) -> None:
    faults.break_it(copy, "head lost", faults.SOURCE, Checkpoint.open(tiny))
    before = json.loads((copy / "provenance.json").read_text())
    assert run("repair", copy, "--source", tiny, "--out", tmp_path / "mended")[0] == 0
    record = json.loads((tmp_path / "mended" / "provenance.json").read_text())
    assert {k: v for k, v in record.items() if k not in ("files", "mended")} == {
        k: v for k, v in before.items() if k != "files"
    }
    first = "model-00001-of-00003.safetensors"
    assert record["files"][first] == before["files"][faults.FIRST] == sha256_file(tmp_path / "mended" / first)
    assert "model-00003-of-00003.safetensors" not in record["files"]
    assert INDEX not in record["files"]
    assert {n["repair"] for n in record["mended"]} == {"head"}


def test_two_commands_at_once(copy: Path, tiny: Path) -> None:
    faults.break_it(copy, "no dtype", faults.CONFIG, Checkpoint.open(tiny))
    with swap.exclusively(copy):
        code, report = run("repair", copy, "--in-place")
        assert code == 2
        assert "is being mended by another command" in report["error"]
    assert run("repair", copy, "--in-place")[0] == 0


def test_a_full_disk_leaves_the_checkpoint_and_nothing_else(
    copy: Path, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults.break_it(copy, "head changed", faults.SOURCE, Checkpoint.open(tiny))
    before = state(copy)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    code, report = run("repair", copy, "--source", tiny, "--in-place")
    assert code == 1
    assert "disk is full" in report["error"]
    assert state(copy) == before
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint"]
