"""The model card says what the records say, for each kind of model, and the same records give the same card."""

import json
from collections.abc import Callable
from pathlib import Path

import yaml

from assemble.card import render_card
from quantize.console import Reporter
from quantize.runner import Outcome, run
from quantize.stage import Request
from recipes import loader


def made(root: Path, calibration: Path, out: Path) -> tuple[str, Outcome]:
    outcome = run(Request(str(root), out, loader.load("demo"), calibration=calibration, device="cpu"), Reporter())
    return (out / "README.md").read_text(), outcome


def test_dense(quantized: Outcome) -> None:
    card = (quantized.out / "README.md").read_text()
    metadata = yaml.safe_load(card.split("---")[1])
    assert metadata["pipeline_tag"] == "image-text-to-text"
    assert "base_model" not in metadata  # a local directory is nobody's base model
    assert "tiny-qwen3_5-mtp, quantized with NVIDIA ModelOpt 0.47" in card
    assert str(quantized.out.parent) not in card
    assert "/models/" not in card
    assert "MTP head | BF16, as in the source | 15 | 1.6 MB" in card
    assert "--language-model-only" in card
    rules = len(json.loads((quantized.out.with_name("out.run") / "verify" / "verify.json").read_text())["rules"])
    assert f"{rules} rules were checked on the written files: no errors." in card
    assert "not evaluated" in card
    assert "\n\n\n" not in card


def test_text_only_mixture(make_variant: Callable[..., Path], calibration: Path, tmp_path: Path) -> None:
    card, outcome = made(make_variant(moe=True, text_only=True), calibration, tmp_path / "out")
    assert yaml.safe_load(card.split("---")[1])["pipeline_tag"] == "text-generation"
    assert "routed and shared experts" in card
    assert "--language-model-only" not in card
    assert "`Qwen3_5MoeForCausalLM`" in card
    assert "0.23 or newer" not in card
    assert "no errors, 1 warning.\n" in card
    assert f"- {outcome.records['verify'].facts['warnings'][0]}\n\n`provenance.json`" in card


def test_the_same_facts_give_the_same_card(quantized: Outcome) -> None:
    facts = {
        "model": {"name": "org/model", "revision": "0" * 40}, "head": None, "name": "model-nvfp4", "recipe_name": "demo",
        "recipe": loader.load("demo").recipe.model_dump(mode="json"), "plan": quantized.records["plan"].facts,
        "sizes": quantized.records["plan"].facts["sizes"], "calibration": quantized.records["calibrate"].facts,
        "quantize": {"device": "cuda", "gpu": "NVIDIA H200"}, "packages": {"nvidia-modelopt": "0.47.0"},
        "assemble": quantized.records["assemble"].facts, "verify": quantized.records["verify"].facts,
    }  # fmt: skip
    card = render_card(facts)
    assert card == render_card(facts)
    metadata = yaml.safe_load(card.split("---")[1])
    assert (metadata["base_model"], metadata["base_model_relation"]) == ("org/model", "quantized")
    assert "org/model at commit `0000" in card
    assert "| device | NVIDIA H200 |" in card
