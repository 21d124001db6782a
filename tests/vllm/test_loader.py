"""What vLLM's own loader says: nothing about sound checkpoints, and of each kind of fault, that kind."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from assemble.checkpoint import Checkpoint
from assemble.commands.examining import examine
from assemble.vllm_load import Opinion, second_opinions
from quantize.console import Reporter
from quantize.runner import Outcome, run
from quantize.stage import Request
from recipes import loader
from tests.assemble.checkpoints import Copy, link_tree
from tests.assemble.conftest import Pair
from tests.loopback_hub import loopback_hub
from tests.quantize.test_run import VARIANTS
from tests.vllm.conftest import release

Fault = Callable[[Copy], object]
LAYER = "model.language_model.layers.0."
MTP = "mtp.layers.0."
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def header_only(quantized: Path, root: Path) -> Path:
    """Our finished checkpoint: a shard whose file ends with its header, and a shard whose data is a hole."""
    shutil.copytree(quantized, root)
    release(root)
    with (root / FIRST).open("rb+") as file:
        file.truncate(8 + int.from_bytes(file.read(8), "little"))
    return root


@pytest.fixture(scope="module")
def sound(
    bases: dict[str, Pair],
    make_variant: Callable[..., Path],
    calibration: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> list[Path]:
    """Checkpoints that nothing is wrong with: ours, of every variant; mixtures of experts; the unquantized sources."""
    roots = [root for pair in bases.values() for root in pair]
    roots.append(header_only(bases["dense"][1], tmp_path_factory.mktemp("headers") / "checkpoint"))
    for options in VARIANTS:
        out = tmp_path_factory.mktemp("variant") / "out"
        request = Request(str(make_variant(**options)), out, loader.load("demo"), calibration=calibration, device="cpu")
        roots.append(run(request, Reporter()).out)
    return roots


def test_sound_checkpoints_load_whole(sound: list[Path], vllm_python: Path) -> None:
    loads = [(root, tp) for root in sound for tp in (1, 2)]
    for opinion in second_opinions(vllm_python, loads):
        assert opinion.findings == (), opinion.root
        parts = [(part["part"], part["rank"]) for part in opinion.parts]
        assert parts == [(part, rank) for rank in range(opinion.tp) for part in ("target", "draft", "files")]
        assert all(part["written"] > 10 for part in opinion.parts if part["part"] != "files")
        quantized = (opinion.root / "hf_quant_config.json").exists()
        assert opinion.resolved["quantization"] == ("modelopt_mixed" if quantized else None)
        assert opinion.resolved["kv_cache"] == ("fp8_e4m3" if quantized else "auto")


def unknown_name(c: Copy) -> None:
    c.scalar(f"{LAYER}mlp.gate_proj.weight_quantizer._amax", 1)


def half_a_group_ignored(c: Copy) -> None:
    c.ignore(drop=[f"{LAYER}linear_attn.in_proj_a"])


def no_final_norm_in_head(c: Copy) -> None:
    c.drop("mtp.norm.weight")


def no_weight_scale_2(c: Copy) -> None:
    c.drop("lm_head.weight_scale_2")


def no_up_proj(c: Copy) -> None:
    c.drop(f"{LAYER}mlp.up_proj.weight")


def no_keys_in_head(c: Copy) -> None:
    c.drop(f"{MTP}self_attn.k_proj.weight")


def no_input_scale(c: Copy) -> None:
    c.drop(f"{LAYER}linear_attn.in_proj_z.input_scale")


def a_tensor_twice(c: Copy) -> None:
    c.put(f"{LAYER}mlp.up_proj.weight", *c.get(f"{LAYER}mlp.up_proj.weight"), shard=SECOND)


def head_listed_as_quantized(c: Copy) -> None:
    c.layers(lambda q: q.update({f"{MTP}mlp.down_proj": {"quant_algo": "W4A16_NVFP4", "group_size": 16}}))
    c.q(lambda q: q.update(ignore=[]))


def plain_weight_in_fp8_layer(c: Copy) -> None:
    c.bf16(f"{LAYER}linear_attn.out_proj")


def a_bias(c: Copy) -> None:
    """vLLM passes over names that end in `.bias`."""
    c.put(f"{LAYER}mlp.down_proj.bias", "BF16", (256,), bytes(512))


def no_tower(c: Copy) -> None:
    c.drop(*c.names("model.visual."))


def half_a_tower(c: Copy) -> None:
    c.drop("model.visual.patch_embed.proj.weight")


def a_head_with_an_embedding(c: Copy) -> None:
    """It is loaded over the target's into the draft, where vLLM puts the target's again: no harm."""
    c.put("mtp.embed_tokens.weight", *c.get("model.language_model.embed_tokens.weight"))


def to_be_unpickled(c: Copy) -> None:
    (c.root / FIRST).rename(c.root / "pytorch_model.bin")
    (c.root / SECOND).unlink()


FAULTS: list[tuple[Fault, str, str]] = [
    (unknown_name, "VLLM-ERROR", f"vLLM's target: {LAYER}mlp.gate_proj.weight_quantizer._amax"),
    (half_a_group_ignored, "VLLM-ERROR", "vLLM's target"),
    (no_final_norm_in_head, "VLLM-MISSING", "vLLM's draft: model.norm.weight"),
    (no_weight_scale_2, "VLLM-MISSING", "lm_head.weight_scale_2"),
    (no_up_proj, "VLLM-PARTIAL", "mlp.gate_up_proj.weight"),
    (no_keys_in_head, "VLLM-PARTIAL", "vLLM's draft: model.layers.0.self_attn.qkv_proj.weight"),
    (no_input_scale, "VLLM-PARTIAL", "linear_attn.in_proj_qkvz.input_scale"),
    (a_tensor_twice, "VLLM-TWICE", "mlp.gate_up_proj.weight"),
    (head_listed_as_quantized, "VLLM-CUT", "mtp.layers.0.mlp.down_proj.weight"),
    (head_listed_as_quantized, "VLLM-CAST", "model.layers.0.mlp.down_proj.weight"),
    (plain_weight_in_fp8_layer, "VLLM-CAST", "linear_attn.out_proj.weight"),
    (a_bias, "VLLM-UNUSED", "mlp.down_proj.bias"),
    (no_tower, "VLLM-TOWER", "vLLM's target: visual"),
    (half_a_tower, "VLLM-MISSING", "vLLM's target: visual.patch_embed.proj.weight"),
    (a_head_with_an_embedding, "", ""),
    (to_be_unpickled, "VLLM-ERROR", "vLLM's target"),
]


@pytest.fixture(scope="module")
def opinions(
    bases: dict[str, Pair], vllm_python: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[Fault | None, Opinion]:
    """What vLLM's loader says of each broken copy, and (None) of a sound one that is to be split by four."""
    source, base = bases["dense"]
    loads: dict[Fault | None, tuple[Path, int]] = {None: (base, 4)}
    for fault in dict.fromkeys(fault for fault, _, _ in FAULTS):
        copy = Copy(link_tree(base, tmp_path_factory.mktemp("copy") / "checkpoint"), Checkpoint.open(source))
        fault(copy)
        copy.save()
        loads[fault] = (copy.root, 1)
    return dict(zip(loads, second_opinions(vllm_python, list(loads.values())), strict=True))


@pytest.mark.parametrize(("fault", "rule", "where"), FAULTS, ids=[f"{f.__name__}-{rule}" for f, rule, _ in FAULTS])
def test_each_kind_of_fault_is_seen(fault: Fault, rule: str, where: str, opinions: dict[Fault | None, Opinion]) -> None:
    found = opinions[fault].findings
    assert [f for f in found if f.rule == rule and where in f.where] if rule else not found, found
    assert opinions[fault].refused == any(f.rule == "VLLM-ERROR" for f in found)
    assert opinions[fault].complete == (fault in (a_bias, no_tower, a_head_with_an_embedding))


def test_a_gap_is_placed(opinions: dict[Fault | None, Opinion]) -> None:
    finding = next(f for f in opinions[no_up_proj].findings if f.where.endswith("mlp.gate_up_proj.weight"))
    rows, columns = json.loads(finding.found.removeprefix("uint8 ").partition(":")[0])
    assert finding.found.endswith(f"{rows * columns // 2} of {rows * columns} elements were written, none at [{rows // 2}, 0]")


def test_nothing_is_unpickled(opinions: dict[Fault | None, Opinion]) -> None:
    assert "would unpickle" in opinions[to_be_unpickled].findings[0].found


def test_a_tensor_parallel_size_that_does_not_divide(opinions: dict[Fault | None, Opinion]) -> None:
    (finding,) = opinions[None].findings
    assert finding.rule == "VLLM-ERROR"
    assert "2 is not divisible by 4" in finding.found


def test_the_command(bases: dict[str, Pair], quantized: Outcome, vllm_python: Path, tmp_path: Path) -> None:
    copy = Copy(link_tree(quantized.out, tmp_path / "checkpoint"), Checkpoint.open(bases["dense"][0]))
    no_keys_in_head(copy)
    copy.save()

    def verify(root: Path, *options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "assemble", "verify", str(root), "--with-vllm", str(vllm_python), *options]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    good = verify(quantized.out, "--tp", "2")
    assert good.returncode == 0, good.stderr
    assert "vLLM 0.32.0 loads target and draft whole as rank 0 and 1 of 2 (modelopt_mixed, KV cache fp8_e4m3)" in good.stdout
    bad = verify(copy.root, "--json")
    report = json.loads(bad.stdout)
    assert bad.returncode == 1
    assert not report["ok"]
    assert not report["vllm"]["complete"]
    assert "VLLM-PARTIAL" in {finding["rule"] for finding in report["findings"]}


def test_a_hub_id(quantized: Outcome, vllm_python: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with loopback_hub() as hub:
        hub.connect(monkeypatch, tmp_path / "home")
        hub.add("org/quantized", quantized.out)
        found = examine("org/quantized", with_vllm=vllm_python)
        assert not found.report.findings
        assert found.opinion is not None
        assert found.opinion.complete
        shards = {name: sum(r.sent for r in hub.sent(name)) for name in (FIRST, SECOND)}
    assert all(sent < (quantized.out / name).stat().st_size / 10 for name, sent in shards.items())
