"""What others published and what users have on disk is not called broken."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from assemble.checkpoint import INDEX, Checkpoint
from assemble.rules import Severity
from assemble.verify import verify
from benchmarks.headers import SHAPES, config_of, write_headers
from tests.assemble.checkpoints import Copy
from tests.assemble.conftest import Pair
from tests.assemble.mutations.tools import text_only


def published(reference: Path, model: str, num_experts: int | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """NVIDIA's config.json and hf_quant_config.json of a model; with fewer experts, to save time, when given."""
    names = (f"nvidia--{model}-NVFP4_{part}.json" for part in ("config", "hf_quant_config"))
    config, twin = (json.loads((reference / name).read_text()) for name in names)
    if num_experts:
        config["text_config"]["num_experts"] = num_experts
    return config, twin


def test_published_27b(reference: Path, tmp_path: Path) -> None:
    report = verify(write_headers(tmp_path / "checkpoint", *published(reference, "Qwen3.6-27B")))
    assert report.findings == ()
    assert report.requires.vllm == (0, 23)


def test_published_35b_has_the_kv_scheme_warning_and_no_other(reference: Path, tmp_path: Path) -> None:
    root = write_headers(tmp_path / "checkpoint", *published(reference, "Qwen3.6-35B-A3B"))
    assert len(Checkpoint.open(root)) == 93_627
    report = verify(root)
    assert not report.errors
    assert [f.rule for f in report.warnings] == ["CFG-8"]
    assert "absent, though hf_quant_config.json says 'FP8'" in report.warnings[0].found
    assert {f.rule for f in report.findings if f.severity is Severity.INFO} == {"CFG-10"}  # input_activations of a W4A16 group


@pytest.mark.parametrize("model", ["Qwen3.5-122B-A10B", "Qwen3.5-397B-A17B"])
def test_published_plain_nvfp4(model: str, reference: Path, tmp_path: Path) -> None:
    report = verify(write_headers(tmp_path / "checkpoint", *published(reference, model, num_experts=16)))
    assert not report.errors
    assert report.requires.reason == "plain NVFP4"
    # The 397B's ignore does not name mtp.fc: vLLM makes an exception for it, others may not.
    assert [f.rule for f in report.findings] == ([] if "122B" in model else ["IGN-1"])


def test_plain_nvfp4_with_the_head_forgotten_does_not_load(reference: Path, tmp_path: Path) -> None:
    config, twin = published(reference, "Qwen3.5-122B-A10B", num_experts=16)
    for place, key in ((config["quantization_config"], "ignore"), (twin["quantization"], "exclude_modules")):
        place[key] = [e for e in place[key] if not e.startswith("mtp")]
    report = verify(write_headers(tmp_path / "checkpoint", config, twin))
    assert {"IGN-1", "MTP-2"} <= {f.rule for f in report.errors}


def test_plain_nvfp4_with_unnamed_bf16_modules(reference: Path, tmp_path: Path) -> None:
    config, twin = published(reference, "Qwen3.5-122B-A10B", num_experts=16)
    root = write_headers(tmp_path / "checkpoint", config, twin)
    config["quantization_config"]["ignore"].remove("model.language_model.layers.0.linear_attn*")
    (root / "config.json").write_text(json.dumps(config))
    assert {"Q-2", "CFG-7"} <= {f.rule for f in verify(root).errors}


@pytest.mark.parametrize("shape", SHAPES)
def test_our_recipe_at_full_size(shape: str, tmp_path: Path) -> None:
    config = config_of(shape)
    if "num_experts" in config["text_config"]:
        config["text_config"]["num_experts"] = 16
    assert verify(write_headers(tmp_path / "checkpoint", config)).findings == ()


def test_hugging_face_cache_snapshot(bases: dict[str, Pair], tmp_path: Path) -> None:
    """A snapshot is a folder of symbolic links to ../../blobs."""
    cache = tmp_path / "models--org--name"
    snapshot = cache / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    for i, path in enumerate(sorted(bases["dense"][1].iterdir())):
        shutil.copyfile(path, cache / "blobs" / f"{i:064x}")
        (snapshot / path.name).symlink_to(Path("../../blobs") / f"{i:064x}")
    assert verify(snapshot, source=Checkpoint.open(bases["dense"][0]), deep=True).findings == ()


def test_links_inside_the_folder(dense: Copy) -> None:
    """As git-annex and some download tools leave them."""
    (dense.root / "objects").mkdir()
    for path in sorted(dense.root.glob("*.safetensors")):
        path.rename(dense.root / "objects" / path.name)
        path.symlink_to(Path("objects") / path.name)
    assert verify(dense.root, deep=True).findings == ()


def test_scales_of_one_element_vectors(dense: Copy) -> None:
    """() and (1,) both load."""
    for name in [n for n in dense.names("_scale") if dense.get(n)[1] == ()]:
        dtype, _, data = dense.get(name)
        dense.put(name, dtype, (1,), data)
    dense.save()
    assert verify(dense.root, source=dense.source, deep=True).findings == ()


def test_one_shard_without_an_index(dense: Copy) -> None:
    shards = dense.shards
    whole = {n: raw for tensors in shards.values() for n, raw in tensors.items()}
    for path in dense.root.glob("*.safetensors"):
        path.unlink()
    (dense.root / INDEX).unlink()
    shards.clear()
    for name, raw in whole.items():
        dense.put(name, *raw, shard="model.safetensors")
    dense.save()
    (dense.root / INDEX).unlink()
    assert verify(dense.root, deep=True).findings == ()


def test_head_untied_from_an_equal_embedding(dense: Copy) -> None:
    """An untied lm_head in BF16 that equals the embedding is how some fine-tunes are saved."""
    embedding = "model.language_model.embed_tokens.weight"
    dense.bf16("lm_head")
    dense.put("lm_head.weight", *dense.get(embedding))
    dense.layers(lambda q: q.pop("lm_head"))
    dense.save()
    report = verify(dense.root, deep=True)
    assert not {f.rule for f in report.findings} & {"VAL-2", "Q-2", "Q-4"}
    assert not report.errors
    assert report.requires.vllm == (0, 22)


def test_kv_scales_of_a_calibrated_cache(dense: Copy) -> None:
    for leaf in ("k_proj.k_scale", "v_proj.v_scale"):
        dense.scalar(f"model.language_model.layers.3.self_attn.{leaf}", 0.5)
    dense.save()
    assert verify(dense.root, deep=True).findings == ()


def test_norms_in_float32(dense: Copy) -> None:
    for name in [n for n in dense.names("norm.weight") if n.startswith("model.language_model.")]:
        dense.cast(name, "F32")
    dense.save()
    assert verify(dense.root, deep=True).findings == ()


def test_text_only_checkpoint_is_sound_but_needs_a_newer_vllm(dense: Copy) -> None:
    text_only(dense)
    dense.ignore(drop=["model.visual*"])
    dense.save()
    report = verify(dense.root, deep=True)
    assert {f.rule for f in report.findings} == {"CFG-1", "VER-1"}
    assert not report.errors
    assert report.requires.vllm_text == "0.27.0"
