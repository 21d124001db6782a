"""What is measured of whole checkpoints: sound ones, broken ones, and the tiny model that vLLM was measured on."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from assemble.checkpoint import INDEX, Checkpoint
from assemble.dequantize import dequantize_fp8, dequantize_nvfp4
from assemble.errors import InputError
from assemble.nvfp4 import amax, fp8_rows, fp8_scale, quantize_rows, tensor_scale
from quantize.console import Reporter
from quantize.evaluate import mtp
from quantize.evaluate.mtp_cast import cast_head
from quantize.evaluate.mtp_faults import inspect_head
from quantize.evaluate.weights import Weights
from quantize.runner import Outcome, run
from quantize.stage import Request
from recipes import loader
from tests.quantize.evaluate.editing import broken

Tensors = dict[str, torch.Tensor]
VLLM = {"bf16": {"2": 2.48, "4": 3.03}, "quantized": {"2": 2.48, "4": 3.01}}  # measured in vLLM 0.26 on an H200


def swap_halves(tensors: Tensors) -> None:
    tensors["mtp.fc.weight"] = torch.cat(tensors["mtp.fc.weight"].chunk(2, dim=1)[::-1], dim=1)


def zero(name: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[name] = torch.zeros_like(tensors[name])

    return change


def poison(tensors: Tensors) -> None:
    tensors["mtp.layers.0.mlp.up_proj.weight"][0, 0] = torch.nan


@pytest.fixture(scope="module")
def measure(tiny: Path, code_rows: list[list[int]], few: mtp.Settings) -> Callable[..., dict[str, Any]]:
    def measured(root: Path, settings: mtp.Settings = few) -> dict[str, Any]:
        source = Weights(Checkpoint.open(tiny))
        return mtp.evaluate_mtp(source, Weights(Checkpoint.open(root)), code_rows, settings, "cpu", Reporter())

    return measured


@pytest.fixture(scope="module")
def sound(quantized: Outcome, measure: Callable[..., dict[str, Any]], few: mtp.Settings) -> dict[str, Any]:
    """A finished checkpoint's head, and casts of it."""
    import dataclasses

    return measure(quantized.out, dataclasses.replace(few, casts=("FP8", "NVFP4")))


def test_a_sound_head(sound: dict[str, Any]) -> None:
    assert sound["warnings"] == sound["head"] == []
    assert json.loads(json.dumps(sound)) == sound
    cases = {(row["body"], row["head"]) for row in sound["table"]}
    assert cases == {(body, head) for body in ("bf16", "quantized") for head in ("BF16", "FP8", "NVFP4")}
    for body in ("bf16", "quantized"):
        found = sound["bodies"][body]
        assert list(found["tokens_per_step"]) == ["1", "2", "3", "4"]
        assert found["acceptance"]["1"][0] > 0.4
        for k, shares in found["acceptance"].items():
            assert len(shares) == int(k)
            assert found["tokens_per_step"][k] == pytest.approx(1 + sum(shares), abs=1e-3)
            low, high = found["interval"][k]
            assert low <= found["tokens_per_step"][k] <= high
        row = next(r for r in sound["table"] if (r["body"], r["head"], r["k"]) == (body, "BF16", 2))
        assert row["tokens_per_step"] == found["tokens_per_step"]["2"]
        assert row["accepted"] == sum(row["accepted_by_position"])
        assert row["drafted"] == 2 * row["steps"]
    costs = {(best["body"], best["head"]): best["draft_cost"] for best in sound["best"]}
    assert costs["quantized", "BF16"] > costs["quantized", "FP8"] > costs["quantized", "NVFP4"]
    assert costs["quantized", "BF16"] > costs["bf16", "BF16"]  # the same head beside a smaller body


def test_the_table_for_people(sound: dict[str, Any]) -> None:
    text = "\n".join(mtp.markdown(sound))
    value = sound["bodies"]["quantized"]["tokens_per_step"]["2"]
    assert f"| quantized | BF16 | {sound['bodies']['quantized']['tokens_per_step']['1']:.2f} ± " in text
    assert f" {value:.2f} ± " in text
    console = Console(width=120, record=True, highlight=False)
    mtp.print_result(sound, console)
    shown = console.export_text()
    assert "K that pays" in shown
    assert "NVFP4" in shown
    assert "WARNING" not in shown


@pytest.mark.parametrize(
    ("change", "named", "dead"),
    [
        (swap_halves, "mtp.fc.weight (its two halves are swapped", True),
        (zero("mtp.fc.weight"), "mtp.fc.weight (all zeros)", True),
        (poison, "mtp.layers.0.mlp.up_proj.weight (holds NaN or infinity)", True),
        (zero("mtp.layers.0.self_attn.o_proj.weight"), "mtp.layers.0.self_attn.o_proj.weight (all zeros)", False),
        (zero("mtp.pre_fc_norm_hidden.weight"), "mtp.pre_fc_norm_hidden.weight (all zeros, the source's is not)", False),
    ],
)
def test_a_broken_head_is_named(
    change: Callable[[Tensors], None], named: str, dead: bool, quantized: Outcome, sound: dict[str, Any],
    measure: Callable[..., dict[str, Any]], tmp_path: Path,
) -> None:  # fmt: skip
    """What drafts nothing shows as nothing, and its cause is named; so is damage that acceptance survives."""
    found = measure(broken(quantized.out, tmp_path / "broken", change))
    (warning,) = found["warnings"]
    assert named in warning
    own = found["bodies"]["quantized"]["acceptance"]["1"][0]
    if dead:
        assert own < 0.1
        assert "of no use" in warning
    else:
        assert own <= sound["bodies"]["quantized"]["acceptance"]["1"][0]
    heads = {(row["body"], row["head"]) for row in found["table"]}
    assert heads == {("bf16", "BF16"), ("quantized", "source's"), ("quantized", "its own")}
    healthy = next(r for r in found["table"] if (r["body"], r["head"], r["k"]) == ("quantized", "source's", 1))
    assert healthy["accepted"] / healthy["drafted"] > 0.4
    assert f"**{warning[0].upper()}" in "\n".join(mtp.markdown(found))


def test_a_checkpoint_without_a_head(make_variant: Callable[..., Path], measure: Callable[..., dict[str, Any]]) -> None:
    """Nothing can be drafted: a token a step, and the reason; the source's head on its own body is measured."""
    found = measure(make_variant(head="none"))
    (warning,) = found["warnings"]
    assert warning.startswith("nothing can be drafted: there is no MTP head: no mtp.* tensor")
    assert "assemble splice" in warning
    assert set(found["bodies"]["quantized"]["tokens_per_step"].values()) == {1.0}
    assert found["bodies"]["bf16"]["tokens_per_step"]["2"] > 1.3
    assert "**Nothing can be drafted" in "\n".join(mtp.markdown(found))
    mtp.print_result(found, Console(quiet=True))


@pytest.mark.parametrize("part", ["mtp.norm.weight", "mtp.layers.0.mlp.experts.3.up_proj.weight"])
def test_a_head_with_a_gap(
    part: str, make_variant: Callable[..., Path], tiny_moe: Path, code_rows: list[list[int]], few: mtp.Settings
) -> None:
    """A tensor of a head is missing, of one expert for example: named from the headers."""
    root = make_variant(moe=True, split=True, shards=1, head="own")
    shard = max(root.glob("*.safetensors"))
    kept = {name: tensor for name, tensor in load_file(shard).items() if name != part}
    save_file(kept, shard, metadata={"format": "pt"})
    index = json.loads((root / INDEX).read_text())
    del index["weight_map"][part]
    (root / INDEX).write_text(json.dumps(index))
    source, written = Weights(Checkpoint.open(tiny_moe)), Weights(Checkpoint.open(root))
    found = mtp.evaluate_mtp(source, written, code_rows, few, "cpu", Reporter())
    assert found["head"] == [{"tensor": part, "what": "absent", "sqnr_db": None}]
    assert f"the MTP head is not whole: {part} missing" in found["warnings"][0]
    assert found["bodies"]["bf16"]["tokens_per_step"]["2"] > 1.3


def test_a_head_taken_from_elsewhere(
    tiny: Path, make_variant: Callable[..., Path], code_rows: list[list[int]], few: mtp.Settings
) -> None:
    """The source lost its head and the checkpoint has another's: that one is what it is held against."""
    source, written = (Weights(Checkpoint.open(make_variant(head=head))) for head in ("none", "last"))
    found = mtp.evaluate_mtp(source, written, code_rows, few, "cpu", Reporter(), origin=Weights(Checkpoint.open(tiny)))
    assert found["head"] == found["warnings"] == []
    same = ("tokens_per_step", "acceptance")
    assert {k: found["bodies"]["bf16"][k] for k in same} == {k: found["bodies"]["quantized"][k] for k in same}


def test_findings_need_no_source(tiny: Path) -> None:
    tensors = Weights(Checkpoint.open(tiny)).mtp_tensors()
    assert inspect_head(tensors, None) == inspect_head(tensors, dict(tensors)) == []
    (found,) = inspect_head(tensors | {"fc.weight": tensors["fc.weight"] * 0}, None)
    assert (found.tensor, found.what) == ("mtp.fc.weight", "all zeros")
    (found,) = inspect_head(tensors | {"norm.weight": tensors["norm.weight"] + 1}, tensors)
    assert (found.tensor, found.what) == ("mtp.norm.weight", "not the source's")
    assert found.sqnr_db is not None


def test_a_cast_head_is_what_the_formats_hold(tiny: Path) -> None:
    """Against the reference of the formats in numpy: every matrix, and no norm."""
    tensors = Weights(Checkpoint.open(tiny)).mtp_tensors()
    for form in ("FP8", "NVFP4"):
        cast = cast_head(tensors, form)
        for name, tensor in tensors.items():
            rows = tensor.float().numpy()
            if tensor.dim() == 1:
                assert torch.equal(cast[name], tensor)
                continue
            if form == "FP8":
                scale = fp8_scale(amax([rows]))
                expected = dequantize_fp8(fp8_rows(rows, scale), float(scale))
            else:
                scale = tensor_scale(amax([rows]))
                packed = quantize_rows(rows, scale)
                expected = dequantize_nvfp4(packed.weight, packed.weight_scale, float(scale))
            assert torch.equal(cast[name], torch.from_numpy(expected).bfloat16()), name


def test_a_mixtures_routers_are_not_cast(tiny_moe: Path) -> None:
    tensors = Weights(Checkpoint.open(tiny_moe)).mtp_tensors()
    cast = cast_head(tensors, "FP8")
    same = {name for name, tensor in tensors.items() if tensor.dim() > 1 and torch.equal(cast[name], tensor)}
    assert same == {"layers.0.mlp.gate.weight", "layers.0.mlp.shared_expert_gate.weight"}
    assert cast["layers.0.mlp.experts.gate_up_proj"].shape == tensors["layers.0.mlp.experts.gate_up_proj"].shape


def test_a_mixture_is_measured(tiny_moe: Path, code_rows: list[list[int]], few: mtp.Settings) -> None:
    weights = Weights(Checkpoint.open(tiny_moe))
    found = mtp.evaluate_mtp(None, weights, code_rows, few, "cpu", Reporter())
    assert list(found["bodies"]) == ["quantized"]
    assert found["bodies"]["quantized"]["acceptance"]["1"][0] > 0.4
    assert found["best"][0]["verify_cost"] > 0


def test_rows_that_are_too_short(tiny: Path, few: mtp.Settings) -> None:
    weights = Weights(Checkpoint.open(tiny))
    with pytest.raises(InputError, match=r"no row of the held-out text has 40 tokens \(the longest has 3\)"):
        mtp.evaluate_mtp(None, weights, [[1, 2, 3]], few, "cpu", Reporter())


def test_given_costs_are_taken(tiny: Path, code_rows: list[list[int]]) -> None:
    settings = mtp.Settings(num_prompts=2, prompt_tokens=20, new_tokens=6, max_drafts=2, draft_cost=0.25, verify_cost=0.05)
    found = mtp.evaluate_mtp(None, Weights(Checkpoint.open(tiny)), code_rows, settings, "cpu", Reporter())
    body = found["bodies"]["quantized"]
    assert body["speedup"]["2"] == pytest.approx(body["tokens_per_step"]["2"] / 1.6, abs=1e-3)
    assert found["best"][0]["costs"] == "as given"


@pytest.fixture(scope="module")
def as_measured(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained model, quantized as the one that vLLM was measured with: rows 32 to 47, 512 tokens, a row a batch."""
    folder = tmp_path_factory.mktemp("as-measured")
    rows, recipe = folder / "rows.jsonl", folder / "recipe.yaml"
    rows.write_text("\n".join((trained / "heldout.jsonl").read_text().splitlines()[32:48]))
    text = loader.load("demo").text.replace("sequence_length: 256", "sequence_length: 512")
    recipe.write_text(text.replace("batch_size: 16", "batch_size: 1"))
    request = Request(str(trained), folder / "out", loader.load(str(recipe)), calibration=rows, device="cpu")
    return run(request, Reporter()).out


def test_vllms_own_numbers(trained: Path, as_measured: Path) -> None:
    """The protocol that vLLM was measured with: rows 0 to 15 cut to 256 tokens, 128 new tokens. Within 5 %."""
    tokenizer = Tokenizer.from_file(str(trained / "tokenizer.json"))
    lines = (trained / "heldout.jsonl").read_text().splitlines()[:16]
    rows = [tokenizer.encode(json.loads(line)["article"]).ids for line in lines]
    source, written = (Weights(Checkpoint.open(root)) for root in (trained, as_measured))
    found = mtp.evaluate_mtp(source, written, rows, mtp.Settings(max_drafts=4), "cpu", Reporter())
    assert found["prompts"] == 16
    for body, served in VLLM.items():
        for k, value in served.items():
            assert found["bodies"][body]["tokens_per_step"][k] == pytest.approx(value, rel=0.05), (body, k)
