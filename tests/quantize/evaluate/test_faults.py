"""One broken module at a time: the report names it, first, and says what it is; a healthy checkpoint has nothing to name."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from assemble.checkpoint import Checkpoint
from quantize.console import Reporter
from quantize.evaluate.outliers import Outlier, outliers
from quantize.evaluate.rows import Batch
from quantize.evaluate.walk import Walked, walk
from quantize.evaluate.weights import Weights
from quantize.runner import Outcome
from tests.quantize.evaluate.editing import Tensors, broken

L = "model.language_model.layers"
Walk = Callable[[Path, Path], Walked]


def scale(name: str, factor: float) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[name] = (tensors[name].float() * factor).to(tensors[name].dtype)

    return change


def swap(one: str, other: str, leaves: tuple[str, ...]) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for leaf in leaves:
            a, b = f"{one}.{leaf}", f"{other}.{leaf}"
            tensors[a], tensors[b] = tensors[b], tensors[a]

    return change


def halves(tensors: Tensors) -> None:
    first, second = tensors["mtp.fc.weight"].chunk(2, dim=1)
    tensors["mtp.fc.weight"] = torch.cat((second, first), dim=1)


def zero(name: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[name] = torch.zeros_like(tensors[name])

    return change


def not_a_number(tensors: Tensors) -> None:
    codes = tensors[f"{L}.2.mlp.up_proj.weight_scale"].view(torch.uint8).clone()
    codes[3, 1] = 0x7F
    tensors[f"{L}.2.mlp.up_proj.weight_scale"] = codes.view(torch.float8_e4m3fn)


NVFP4 = ("weight", "weight_scale", "weight_scale_2")
FAULTS: dict[str, tuple[Callable[[Tensors], None], list[str], str]] = {
    "scale 1.5": (scale(f"{L}.1.mlp.down_proj.weight_scale_2", 1.5), [f"{L}.1.mlp.down_proj"], "1.5 times the source: a scale"),
    "gate scale 1.5": (scale(f"{L}.1.mlp.gate_proj.weight_scale_2", 1.5), [f"{L}.1.mlp.gate_proj"], "1.5 times the source"),
    "FP8 scale": (scale(f"{L}.3.self_attn.o_proj.weight_scale", 1.5), [f"{L}.3.self_attn.o_proj"], "1.5 times the source"),
    "block scales": (scale(f"{L}.0.mlp.down_proj.weight_scale", 0.5), [f"{L}.0.mlp.down_proj"], "0.5 times the source"),
    "lm_head": (scale("lm_head.weight_scale_2", 1.5), ["lm_head"], "1.5 times the source"),
    "gate and up": (
        swap(f"{L}.2.mlp.gate_proj", f"{L}.2.mlp.up_proj", NVFP4),
        [f"{L}.2.mlp.gate_proj", f"{L}.2.mlp.up_proj"],
        "holds the values of",
    ),
    "zeroed head tensor": (zero("mtp.layers.0.mlp.up_proj.weight"), ["mtp.layers.0.mlp.up_proj.weight"], "is all zeros"),
    "fc halves": (halves, ["mtp.fc.weight"], "halves of its columns (its inputs) swapped"),
    "head layer norm": (
        scale("mtp.layers.0.input_layernorm.weight", 2.0), ["mtp.layers.0.input_layernorm.weight"], "2 times the source's"
    ),
    "norm": (scale(f"{L}.2.input_layernorm.weight", 3.0), [f"{L}.2.input_layernorm.weight"], "3 times the source's"),
    "embedding": (zero("model.language_model.embed_tokens.weight"), ["model.language_model.embed_tokens.weight"], "all zeros"),
    "vision": (zero("model.visual.merger.norm.weight"), ["model.visual.merger.norm.weight"], "all zeros"),
    "input scale": (scale(f"{L}.1.linear_attn.out_proj.input_scale", 1 / 50), [f"{L}.1.linear_attn.out_proj"], "are clipped"),
    "NaN": (not_a_number, [f"{L}.2.mlp.up_proj"], "NaN or infinity"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named(fault: str, walked: Walk, tiny: Path, quantized: Outcome, tmp_path: Path) -> None:
    change, expected, text = FAULTS[fault]
    found = outliers(walked(tiny, broken(quantized.out, tmp_path / "broken", change)))
    assert sorted(outlier.where for outlier in found) == sorted(expected), found
    assert all(text in outlier.text for outlier in found), found


def test_other_experts_weights_are_recognized(walked: Walk, tiny_moe: Path, quantized_moe: Outcome, tmp_path: Path) -> None:
    change = swap(f"{L}.1.mlp.experts.2.down_proj", f"{L}.1.mlp.experts.5.down_proj", NVFP4)
    found = outliers(walked(tiny_moe, broken(quantized_moe.out, tmp_path / "broken", change)))
    assert sorted(o.where for o in found) == [f"{L}.1.mlp.experts.{e}.down_proj" for e in (2, 5)]
    by_name = {o.where: o.text for o in found}
    assert f"holds the values of {L}.1.mlp.experts.5.down_proj" in by_name[f"{L}.1.mlp.experts.2.down_proj"]


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_a_healthy_checkpoint_has_none(
    kind: str, walked: Walk, tiny: Path, tiny_moe: Path, request: pytest.FixtureRequest
) -> None:
    written = request.getfixturevalue("quantized" if kind == "dense" else "quantized_moe").out
    assert outliers(walked(tiny if kind == "dense" else tiny_moe, written)) == []


def test_a_head_from_elsewhere_is_held_against_where_it_is_from(
    tiny: Path, quantized: Outcome, few_batches: list[Batch], tmp_path: Path
) -> None:
    other = broken(tiny, tmp_path / "other", scale("mtp.norm.weight", 3.0))
    written = broken(quantized.out, tmp_path / "written", scale("mtp.norm.weight", 3.0))
    source, elsewhere, made = (Weights(Checkpoint.open(root)) for root in (tiny, other, written))
    assert outliers(walk(source, made, elsewhere, few_batches, "cpu", Reporter())) == []
    found = outliers(walk(source, made, source, few_batches, "cpu", Reporter()))
    assert [o.where for o in found] == ["mtp.norm.weight"]


def test_a_fused_pair_with_two_scales_is_named(walked: Walk, tiny: Path, quantized: Outcome, tmp_path: Path) -> None:
    """Both are right by themselves, but a server uses one scale for both, so one of them comes out wrong."""

    def change(tensors: Tensors) -> None:
        module = f"{L}.1.mlp.up_proj"
        tensors[f"{module}.weight_scale_2"] = tensors[f"{module}.weight_scale_2"] / 2
        tensors[f"{module}.weight_scale"] = (
            (tensors[f"{module}.weight_scale"].float() * 2).clamp(max=448).to(torch.float8_e4m3fn)
        )

    found = outliers(walked(tiny, broken(quantized.out, tmp_path / "broken", change)))
    assert found[0] == Outlier(f"{L}.1.mlp.up_proj", found[0].text)
    assert "vLLM takes its fused group's" in found[0].text
    assert "2 times what they are" in found[0].text
