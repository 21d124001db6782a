"""`diff`: what differs between two checkpoints, by meaning."""

import json
import shutil
from pathlib import Path

import pytest

from assemble.checkpoint import Checkpoint
from assemble.diff import compare
from quantize.runner import Outcome
from tests.assemble import faults
from tests.assemble.repairs import Editable
from tests.assemble.test_repair import run


@pytest.fixture
def copy(quantized: Outcome, tmp_path: Path) -> Path:
    return Path(shutil.copytree(quantized.out, tmp_path / "checkpoint"))


def found(a: Path, b: Path) -> list[tuple[str, str]]:
    return [(d.kind, d.where) for d in compare(a, b)]


def test_a_copy_is_equal_however_its_json_is_spelt(copy: Path, quantized: Outcome) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(dict(reversed(config.items()))))
    code, report = run("diff", quantized.out, copy)
    assert (code, report) == (0, {"equal": True, "verdict": "equal", "differences": []})


NORM = "model.language_model.norm.weight"


def test_each_kind_of_difference_is_told(copy: Path, quantized: Outcome, tiny: Path) -> None:
    edited = Editable.open(copy)
    faults._flip(edited, NORM)
    faults._float32(edited, "mtp.norm.weight")
    dtype, shape, data = edited.get("mtp.pre_fc_norm_hidden.weight")
    edited.put("mtp.pre_fc_norm_hidden.weight", (dtype, (1, *shape), data))
    edited.drop("mtp.pre_fc_norm_embedding.weight")
    edited.put("extra.weight", (dtype, shape, data))
    edited.put("lm_head.weight", edited.drop("lm_head.weight"), faults.SECOND)
    edited.config["text_config"]["rms_norm_eps"] = 1
    edited.q["quantized_layers"].pop("lm_head")
    edited.twin["quantization"]["kv_cache_quant_algo"] = None
    edited.save()
    (copy / "tokenizer.json").write_text("{}")
    (copy / "README.md").unlink()
    assert found(quantized.out, copy) == [
        ("tensor", "extra.weight"),
        ("place", "lm_head.weight"),
        ("bytes", NORM),
        ("dtype", "mtp.norm.weight"),
        ("tensor", "mtp.pre_fc_norm_embedding.weight"),
        ("shape", "mtp.pre_fc_norm_hidden.weight"),
        ("config", "config.json: text_config.rms_norm_eps"),
        ("config", "config.json: quantization_config.quantized_layers.lm_head"),
        ("config", "hf_quant_config.json: quantization.kv_cache_quant_algo"),
        ("file", "README.md"),
        ("file", "tokenizer.json"),
    ]
    code, report = run("diff", quantized.out, copy)
    assert code == 1
    assert report["verdict"].startswith("different: 2 tensors in one only, 1 places, 1 tensors in bytes")
    assert next(d for d in report["differences"] if d["kind"] == "bytes")["a"] == "1 of 512 bytes differ"


def test_only_places_differ(copy: Path, quantized: Outcome) -> None:
    edited = Editable.open(copy)
    edited.put(NORM, edited.drop(NORM), faults.FIRST)
    edited.save()
    code, report = run("diff", quantized.out, copy)
    assert code == 1
    assert report["verdict"] == "the same content, laid out differently: 1 tensors lie in other shards"


@pytest.mark.parametrize("fault", ["index is not JSON", "shard cut off", "config is not JSON", "tensor stored twice alike"])
def test_a_broken_checkpoint_can_be_compared(fault: str, copy: Path, quantized: Outcome, tiny: Path) -> None:
    faults.break_it(copy, fault, faults.FILES | faults.SOURCE, Checkpoint.open(tiny))
    code, report = run("diff", quantized.out, copy)
    assert code == (0 if fault in ("index is not JSON", "tensor stored twice alike") else 1), report["verdict"]


def test_what_is_no_checkpoint_is_refused(copy: Path, tmp_path: Path) -> None:
    code, report = run("diff", copy, tmp_path / "nowhere")
    assert code == 2
    assert "is not a directory" in report["error"]
