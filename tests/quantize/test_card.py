"""The model card says what the records say, for each kind of model, and the same records give the same card."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from assemble.card import render_card
from quantize.console import Reporter
from quantize.runner import Outcome, run
from quantize.stage import Request, SmokeTarget
from recipes import loader
from tests.quantize.smoke.replay import replaying
from tests.quantize.smoke.test_stage import context

E = {"value": 0.0312, "low": 0.0298, "high": 0.0327}
EVALUATED = {
    "data": {"name": "heldout.jsonl", "commit": None, "rows": 16, "tokens_per_row": 256, "scored_tokens": 4080,
             "token_ids_sha256": "0" * 64, "calibration": "disjoint", "excluded_rows": 0},
    "quality": dict.fromkeys(
        ("nll_bf16", "nll_quantized", "nll_increase", "perplexity_bf16", "perplexity_quantized", "kl_mean", "kl_p99"), E)
    | {"top1_agreement": {"value": 0.95, "low": 0.94, "high": 0.96}},
    "schemes": [{"scheme": "FP8", "modules": 13, "sqnr_db_median": 31.5, "sqnr_db_lowest": 31.4, "lowest": "model.x"}],
    "outliers": [{"where": "model.y", "text": "is all zero"}],
    "mtp": {"bodies": {name: {"tokens_per_step": {"1": n, "2": n + 0.6}} for name, n in (("bf16", 1.8), ("quantized", 1.7))}},
    "not_simulated": ["batching"],
    "gates": [{"name": "max_kl", "limit": 0.1, "found": 0.03, "passed": True}],
}  # fmt: skip
SERVED = {
    "passed": True, "reached": "python", "vllm": "0.26.0", "gpus": [{"name": "NVIDIA H200", "capability": "9.0"}],
    "sm_120": "not tried", "kernels": {"NVFP4": ["MarlinNvFp4LinearKernel"], "attention": ["FLASH_ATTN"]},
    "acceptance": {"num_speculative_tokens": 2, "drafts": 825, "drafted": 1650, "accepted": 1220, "rate": 0.739,
                   "by_position": [0.82, 0.65], "tokens_per_step": 2.48, "floor": 0.3, "predicted_tokens_per_step": 2.455},
    "agreement": {"prompts": 16, "same": 5, "near_ties": 11, "diverged": 0, "largest_margin": 0.12, "limit": 0.5},
    "checks": [{"name": "acceptance", "status": "pass", "found": "74 % | of drafts"}],
}  # fmt: skip


def made(root: Path, calibration: Path, out: Path) -> tuple[str, Outcome]:
    outcome = run(Request(str(root), out, loader.load("demo"), calibration=calibration, device="cpu"), Reporter())
    return (out / "README.md").read_text(), outcome


def metadata(card: str) -> dict[str, Any]:
    return dict(yaml.safe_load(card.split("---")[1]))


@pytest.fixture
def facts(quantized: Outcome) -> dict[str, Any]:
    """What the card of the finished run was rendered from."""
    return dict(json.loads((quantized.out / "provenance.json").read_text())["card"])


def test_dense(quantized: Outcome) -> None:
    card, record = (quantized.out / "README.md").read_text(), (quantized.out / "provenance.json").read_text()
    assert metadata(card)["pipeline_tag"] == "image-text-to-text"
    assert "base_model" not in metadata(card)  # a local directory is nobody's base model
    assert "tiny-qwen3_5-mtp, quantized with NVIDIA ModelOpt 0.47" in card
    for text in (card, record):
        assert str(quantized.out.parent) not in text
        assert "/models/" not in text
    assert "MTP head | BF16, as in the source | 15 | 1.6 MB" in card
    serve = card.split("## Serve")[1].split("For particular GPUs")[0]
    assert "--language-model-only" in serve
    assert "  --no-enable-prefix-caching\n" in serve  # with drafting, a cached prefix corrupts the output
    assert "--moe-backend" not in serve
    rules = len(json.loads((quantized.out.with_name("out.run") / "verify" / "verify.json").read_text())["rules"])
    assert f"{rules} rules were checked on the written files, tensor values included: no errors." in card
    assert "\n\n\n" not in card


def test_what_was_not_done_is_said(quantized: Outcome) -> None:
    card = (quantized.out / "README.md").read_text()
    for said in ("Not evaluated.", "Not loaded in vLLM", "Draft acceptance was not measured", "Benchmarks", "Speed was not"):
        assert said in card


def test_it_tells_how_to_make_it_again(quantized: Outcome) -> None:
    card = (quantized.out / "README.md").read_text()
    assert "python -m quantize run tiny-qwen3_5-mtp out --recipe demo --calibration rows.jsonl" in card
    assert loader.load("demo").text.strip() in card
    assert quantized.records["calibrate"].facts["token_ids_sha256"] in card


def test_text_only_mixture(make_variant: Callable[..., Path], calibration: Path, tmp_path: Path) -> None:
    card, outcome = made(make_variant(moe=True, text_only=True), calibration, tmp_path / "out")
    assert metadata(card)["pipeline_tag"] == "text-generation"
    assert "routed and shared experts" in card
    assert "--language-model-only" not in card.split("For particular GPUs")[0]
    assert "`Qwen3_5MoeForCausalLM`" in card
    assert "0.23 or newer" not in card
    assert "vLLM 0.27 or newer has the text-only class" in card
    assert "  --moe-backend marlin \\\n" in card.split("For particular GPUs")[0]
    assert "no errors, 1 warning.\n" in card
    assert f"- {outcome.records['verify'].facts['warnings'][0]}\n" in card


def test_a_base_model_on_the_hub(facts: dict[str, Any]) -> None:
    base = {"license": "other", "license_name": "qwen", "license_link": "LICENSE", "language": ["en", "zh"]}
    facts |= {
        "model": {"name": "org/model", "revision": "0" * 40, "metadata": base},
        "quantize": {"device": "cuda", "gpu": "H200"},
    }
    card = render_card(facts, "user/model-nvfp4")
    assert card == render_card(facts, "user/model-nvfp4")
    told = metadata(card)
    assert (told["base_model"], told["base_model_relation"]) == ("org/model", "quantized")
    assert (told["license"], told["license_name"], told["language"]) == ("other", "qwen", ["en", "zh"])
    assert told["license_link"] == "https://huggingface.co/org/model/blob/main/LICENSE"
    assert "org/model at commit `0000" in card
    assert "| device | H200 |" in card
    assert "vllm serve user/model-nvfp4" in card
    assert "# model-nvfp4\n" in card


def test_evaluated_and_served(facts: dict[str, Any]) -> None:
    facts |= {"evaluate": EVALUATED, "smoke": SERVED, "plots": ["evaluation-acceptance.png", "evaluation-kl-histogram.png"]}
    card = render_card(facts, "out")
    for said in (
        "| KL divergence, mean, nats a token | 0.0312 (0.0298 to 0.0327) |",
        "| same most likely token | 95.0 % (94.0 % to 96.0 %) |",
        "| quantized | 1.70 | 2.30 |",
        "![KL divergence, token by token](evaluation-kl-histogram.png)",
        "- `model.y`: is all zero",
        "max_kl 0.03 (limit 0.1); all were met.",
        "vLLM 0.26.0 on NVIDIA H200 (compute capability 9.0): all checks passed.",
        "| acceptance | pass | 74 % \\| of drafts |",
        "1220 of 1650 drafted tokens were accepted (73.9 %; by position 82.0 %, 65.0 %): 2.48 tokens a step with 2 drafts",
        "2.46 were predicted offline",
        "NVFP4 `MarlinNvFp4LinearKernel`; attention `FLASH_ATTN`.",
        "- Not simulated: batching.",
        "compute capability 12.0) were not tried",
    ):
        assert said in card, said
    assert "`python -m quantize evaluate DIR --source tiny-qwen3_5-mtp --data heldout.jsonl`" in card
    assert "Not evaluated" not in card
    assert "no smoke test was run" not in card


def test_what_failed_is_said(facts: dict[str, Any]) -> None:
    card = render_card(facts | {"failures": {"evaluate": "max_kl: 0.2, limit 0.1", "smoke": ""}}, "out")
    assert "The evaluation was run and **did not pass**: max_kl: 0.2, limit 0.1." in card
    assert "A smoke test was run and **did not pass**." in card


def test_what_a_real_vllm_told(facts: dict[str, Any], tiny: Path, tmp_path: Path) -> None:
    """The smoke stage's own facts, from the recorded answers of a vLLM that served the unquantized model."""
    from quantize.stages import smoke

    told = dict(smoke.run(context(tiny, tmp_path, SmokeTarget(python=replaying(tmp_path)))).facts)
    card = render_card(facts | {"smoke": told}, "out")
    assert f"Loaded and served by vLLM {told['vllm']}" in card
    for check in told["checks"]:
        assert f"| {check['name']} | {check['status']} | " in card
    assert f"{told['acceptance']['accepted']} of {told['acceptance']['drafted']} drafted tokens were accepted" in card
