"""`splice`: another checkpoint's BF16 head goes in, whatever lay there, and little else is read or written."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from assemble.__main__ import app
from assemble.checkpoint import INDEX, Checkpoint
from assemble.config import MTP_IGNORE
from assemble.verify import verify
from quantize.runner import Outcome
from tests.assemble import faults
from tests.assemble.repairs import Editable, quantize_moe, tensors_of, write_moe
from tests.assemble.test_repair import kills, no_fsync, run, state  # noqa: F401 - a fixture


@pytest.fixture
def copy(quantized: Outcome, tmp_path: Path) -> Path:
    return Path(shutil.copytree(quantized.out, tmp_path / "checkpoint"))


def head_of(root: Path) -> dict:
    return {n: raw for n, raw in tensors_of(root).items() if n.startswith("mtp.")}


def body_of(root: Path) -> dict:
    return {n: raw for n, raw in tensors_of(root).items() if not n.startswith("mtp.")}


def check_head(root: Path, source: Path, body: dict) -> None:
    assert head_of(root) == head_of(source)
    assert body_of(root) == body
    assert not verify(root, source=Checkpoint.open(source)).errors
    index = json.loads((root / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(len(raw[2]) for raw in tensors_of(root).values())
    assert set(index["weight_map"].values()) == {p.name for p in root.glob("*.safetensors")}
    for name, key in (("config.json", "ignore"), ("hf_quant_config.json", "exclude_modules")):
        text = json.loads((root / name).read_text())
        q = text.get("quantization_config") or text["quantization"]
        assert set(MTP_IGNORE) <= set(q[key])
        assert not any(m.startswith("mtp") for m in q["quantized_layers"])


def _undeclared(e: Editable, s: Checkpoint) -> None:
    """As an export through transformers leaves it: no head, and nothing that speaks of one."""
    faults.SOURCE["head lost"](e, s)
    e.config["text_config"].pop("mtp_num_hidden_layers")
    for ignore in (e.q["ignore"], e.twin["quantization"]["exclude_modules"]):
        ignore[:] = [entry for entry in ignore if not entry.startswith("mtp")]


HEADS = {n: b for n, b in faults.SOURCE.items() if n.startswith("head ")} | {
    "head never indexed": faults.FILES["head never indexed"],
    "head under another name of the index": faults.CONFIG["lists the head"],
    "no head and no word of it": _undeclared,
    "head not declared": faults.CONFIG["head not declared"],
}


@pytest.mark.parametrize(("fault", "in_place"), [*((f, True) for f in HEADS), ("head lost", False), ("head quantized", False)])
def test_the_head_goes_in(fault: str, in_place: bool, copy: Path, tiny: Path, tmp_path: Path) -> None:
    faults.break_it(copy, fault, HEADS, Checkpoint.open(tiny))
    body, before = body_of(copy), state(copy)
    out = copy if in_place else tmp_path / "new"
    code, report = run("splice", "--head-from", tiny, copy, *(() if in_place else ("--out", out)))
    assert (code, report["verified"]["ok"]) == (0, True), report
    check_head(out, tiny, body)
    assert (out / faults.FIRST.replace("of-00002", f"of-{len(report['shards']):05d}")).stat().st_ino == before[faults.FIRST][0]
    assert in_place or state(copy) == before
    again = state(out)
    code, report = run("splice", "--head-from", tiny, out)
    assert (code, report["nothing_to_do"], report["mended"]) == (0, True, [])
    assert state(out) == again


@pytest.mark.parametrize("options", [{"shards": 3, "head": "own"}, {"shards": 5, "head": "first"}], ids=str)
def test_the_head_may_lie_anywhere_in_the_source(
    options: dict, copy: Path, make_variant: Callable[..., Path], tiny: Path
) -> None:
    faults.break_it(copy, "head lost", faults.SOURCE, Checkpoint.open(tiny))
    body = body_of(copy)
    source = make_variant(**options)
    assert run("splice", "--head-from", source, copy)[0] == 0
    check_head(copy, source, body)


@pytest.mark.parametrize("split", [False, True])
def test_a_mixture_of_experts_takes_the_layout_of_the_new_head(split: bool, tiny: Path, tmp_path: Path) -> None:
    source = write_moe(tmp_path / "source", tiny, split_head=split)
    other = write_moe(tmp_path / "other", tiny, split_head=not split, seed=1)
    checkpoint = quantize_moe(source, tmp_path / "checkpoint")
    before, body = state(checkpoint), body_of(checkpoint)
    code, report = run("splice", "--head-from", other, checkpoint, "--out", tmp_path / "new")
    assert code == 0, report
    assert head_of(tmp_path / "new") == head_of(other)
    assert body_of(tmp_path / "new") == body
    assert state(checkpoint) == before
    assert run("splice", "--head-from", other, tmp_path / "new")[1]["nothing_to_do"]
    assert run("splice", "--head-from", source, tmp_path / "new")[0] == 0
    check_head(tmp_path / "new", source, body)


def test_what_cannot_be_a_head_is_refused(copy: Path, tiny: Path, make_variant: Callable[..., Path], tmp_path: Path) -> None:
    before = state(copy)
    small = write_moe(tmp_path / "moe", tiny)
    for source, why in (
        (make_variant(head="none"), "has no MTP head"),
        (small, "The head must come from a model of the same size"),
        (tmp_path / "nowhere", "does not exist"),
    ):
        code, report = run("splice", "--head-from", source, copy)
        assert code == 2
        assert why in report["error"] or "incomplete" in report["error"]
    faults.break_it(copy, "head quantized", faults.SOURCE, Checkpoint.open(tiny))
    quantized_head = Path(shutil.copytree(copy, tmp_path / "quantized head"))
    assert run("splice", "--head-from", quantized_head, copy)[0] == 2
    shutil.rmtree(copy)
    assert run("splice", "--head-from", tiny, copy)[0] == 2
    assert before


@pytest.mark.parametrize("fault", ["body tensor stored twice alike", "index misses tensors", "shard cut off", "config lost"])
def test_a_checkpoint_with_other_faults_is_for_repair(fault: str, copy: Path, tiny: Path) -> None:
    faults.break_it(copy, fault, faults.FILES | faults.SOURCE, Checkpoint.open(tiny))
    before = state(copy)
    code, report = run("splice", "--head-from", tiny, copy)
    assert code == 2
    assert "`repair` mends that" in report["error"]
    assert state(copy) == before


MEASURE = """
import sys
from pathlib import Path
from typer.testing import CliRunner
from assemble.__main__ import app
def counters():
    text = Path("/proc/self/io").read_text().split()
    return int(text[1]), int(text[3])
CliRunner().invoke(app, ["splice", "--head-from", "nowhere", "nowhere"])  # imports
before = counters()
result = CliRunner().invoke(app, ["splice", "--head-from", *sys.argv[1:]])
after = counters()
assert result.exit_code == 0, result.output
print(after[0] - before[0], after[1] - before[1])
"""


def measured(source: Path, checkpoint: Path) -> tuple[int, int]:
    """Bytes that a splice reads and writes, by the operating system's count (rchar and wchar: the page cache does not help)."""
    command = [sys.executable, "-c", MEASURE, source, checkpoint]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    read, written = map(int, result.stdout.split())
    return read, written


@pytest.mark.parametrize("place", ["none", "own", "side file", "right"])
def test_reads_and_writes_about_the_heads_size(place: str, tiny: Path, tmp_path: Path) -> None:
    """What the imports of the process read is not counted."""
    source = write_moe(tmp_path / "source", tiny, vocab_size=60_000)
    other = write_moe(tmp_path / "other", tiny, seed=1, vocab_size=60_000)
    checkpoint = quantize_moe(source, tmp_path / "checkpoint")
    edited = Editable.open(checkpoint)
    old = {n: edited.drop(n) for n in list(edited.shards[faults.SECOND]) if n.startswith("mtp.")}
    home = {
        "none": None,
        "own": "model-00003-of-00003.safetensors",
        "side file": "mtp.safetensors",
        "right": "model-00003-of-00003.safetensors",
    }[place]
    _resharded(edited, home, old)
    head = sum(len(raw[2]) for raw in old.values())
    whole = sum(p.stat().st_size for p in checkpoint.iterdir())
    read, written = measured(source if place == "right" else other, checkpoint)
    small = 500_000  # headers, JSON files (read by the plan and by the verification), the tokenizer's names
    assert whole > 3 * (3 * head + small)
    if place == "right":
        assert read < 2 * head + small
        assert written == 0
    else:
        assert read < 1.5 * head + small
        assert head < written < head + small
        assert head_of(checkpoint) == head_of(other)


def _resharded(edited: Editable, home: str | None, head: dict) -> None:
    total = 3 if home and home.startswith("model") else 2
    renamed = {name: name.replace("of-00002", f"of-{total:05d}") for name in edited.shards}
    edited.shards = {renamed[name]: tensors for name, tensors in edited.shards.items()}
    edited.index["weight_map"] = {n: renamed[f] for n, f in edited.index["weight_map"].items()}
    if home:
        edited.shards[home] = head
        if total == 3:
            edited.index["weight_map"] |= dict.fromkeys(head, home)
    edited.save()


def test_only_the_shards_of_the_old_head_are_rewritten(copy: Path, tiny: Path) -> None:
    faults.break_it(copy, "head changed", faults.SOURCE, Checkpoint.open(tiny))
    code, report = run("splice", "--head-from", tiny, copy)
    assert code == 0
    assert [s["linked_from"] for s in report["shards"]] == [faults.FIRST, None, None]
    assert np.isclose(report["bytes_to_write"], sum(s["bytes"] for s in report["shards"][1:]))


def test_killed_at_any_step(tiny: Path, tmp_path: Path) -> None:
    source = write_moe(tmp_path / "source", tiny)
    checkpoint = quantize_moe(source, tmp_path / "checkpoint")
    edited = Editable.open(checkpoint)
    faults._flip(edited, "mtp.fc.weight")
    edited.save()
    assert kills(checkpoint, tmp_path / "work", "exchange", 1, "splice", "--head-from", source) > 30


def test_a_shard_without_pt_metadata_is_left_to_repair(quantized: Outcome, tiny: Path, tmp_path: Path) -> None:
    root = tmp_path / "checkpoint"
    shutil.copytree(quantized.out, root)
    body = root / "model-00001-of-00002.safetensors"
    save_file(load_file(body), body)  # a careless tool: no __metadata__
    other = root / "model-00002-of-00002.safetensors"
    save_file({n: t for n, t in load_file(other).items() if n != "mtp.fc.weight"}, other, metadata={"format": "pt"})
    before = body.read_bytes()
    result = CliRunner().invoke(app, ["splice", "--head-from", str(tiny), str(root), "--json"])
    assert result.exit_code == 0, result.output
    made = json.loads(result.stdout)
    assert [s["linked_from"] for s in made["shards"]].count("model-00001-of-00002.safetensors") == 1
    assert (root / "model-00001-of-00003.safetensors").read_bytes() == before
    assert {f["rule"] for f in made["verified"]["findings"]} == {"IDX-6"}
