"""The verdict on what a real vLLM left, and on that altered as faults alter it."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from assemble.rules import Finding, Severity
from assemble.verify import verify
from quantize.smoke import answers
from quantize.smoke.evidence import Evidence, Expectation, Prediction, predicted, read_expectation
from quantize.smoke.judge import judge
from quantize.smoke.report import FAIL, NOTE, PASS, SKIP, WARN, Check, Report
from quantize.smoke.verdict import verdict as judged
from recipes.schema import Smoke
from tests.quantize.smoke.replay import recorded

LIMITS = Smoke(max_new_tokens=48)
MIXED = Expectation(True, "modelopt_mixed", ("Qwen3_5ForConditionalGeneration",), "Qwen3_5MTP", ("NVFP4", "FP8"))
KERNELS = (
    "INFO [__init__.py:933] Using MarlinNvFp4LinearKernel for NVFP4 GEMM\n"
    "INFO [__init__.py:605] Selected CutlassFP8ScaledMMLinearKernel for ModelOptFp8LinearMethod\n"
)


def verdict(tiny: Path, plain: Any = lambda _: None, mtp: Any = lambda _: None, **options: Any) -> Report:
    """The verdict on the recorded passes over the unquantized model, changed."""
    limits = options.pop("limits", LIMITS)
    passes = {"plain": recorded("plain", plain), "mtp": recorded("mtp", mtp)}
    return judge(Evidence(passes, limits, read_expectation(tiny), **options), "python")


def quantized(change: Any = lambda _: None, log: str = KERNELS, findings: Any = (), **options: Any) -> Report:
    """The same as if the model had been quantized, as far as config and log tell."""

    def both(result: dict[str, Any]) -> None:
        result["resolved"] |= {"quantization": "modelopt_mixed", "kv_cache_dtype": "fp8_e4m3"}
        result["inside"]["kv_cache"] = {"fp8_e4m3: torch.uint8": 2}
        change(result)

    passes = {"plain": recorded("plain", both, log), "mtp": recorded("mtp", both, log)}
    return judge(Evidence(passes, LIMITS, MIXED, findings, **options), "python")


def check(report: Report, name: str) -> Check:
    return next(c for c in report.checks if c.name == name)


def test_the_recorded_passes_pass(tiny: Path) -> None:
    report = verdict(tiny)
    assert report.passed, report.failures
    counted = recorded("mtp").result["speculation"]
    facts = report.facts["acceptance"]
    assert facts["accepted"] == counted["accepted_tokens"] > 100
    assert facts["tokens_per_step"] == pytest.approx(1 + counted["accepted_tokens"] / counted["drafts"])
    assert facts["by_position"] == [n / counted["drafts"] for n in counted["accepted_by_position"]]
    assert report.facts["agreement"]["diverged"] == 0
    assert report.facts["agreement"]["same"] + report.facts["agreement"]["near_ties"] == 6
    assert report.facts["draft_architectures"] == ["Qwen3_5MTP"]
    assert report.facts["sm_120"] == "not tried"
    assert "sm_120 was not tried" in check(report, "hardware").found


def test_facts_hold_no_path_of_the_machine(tiny: Path) -> None:
    assert str(Path(__file__).parents[3]) not in str(verdict(tiny).as_json())


def dead(result: dict[str, Any]) -> None:
    result["speculation"] |= {"accepted_tokens": 0, "accepted_by_position": [0, 0]}


def test_a_dead_head_fails_though_the_text_is_right(tiny: Path) -> None:
    report = verdict(tiny, mtp=dead)
    assert [c.name for c in report.failures] == ["acceptance"]
    assert "0 of" in check(report, "acceptance").found


def test_a_dead_head_is_led_back_to_the_rule_that_is_broken(dense: Any) -> None:
    dense.drop(*dense.names("mtp."))
    dense.save()
    report = quantized(lambda r: dead(r) if r["mtp"] else None, findings=verify(dense.root, require_mtp=True).findings)
    found = check(report, "acceptance")
    assert found.status == FAIL
    assert "CFG-5" in found.cause
    assert "splice" in found.remedy


def test_a_dead_head_without_a_broken_rule_asks_for_the_source() -> None:
    found = check(quantized(lambda r: dead(r) if r["mtp"] else None), "acceptance")
    assert "content is wrong" in found.cause
    assert "--source" in found.remedy
    told = check(quantized(lambda r: dead(r) if r["mtp"] else None, source_given=True), "acceptance")
    assert "--source" not in told.remedy


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda r: r.update(speculation=None), "without speculation"),
        (lambda r: r["speculation"].update(drafts=0, draft_tokens=0, accepted_tokens=0), "nothing was drafted"),
    ],
)
def test_no_drafts_at_all_fail(tiny: Path, change: Callable[[Any], Any], word: str) -> None:
    found = check(verdict(tiny, mtp=change), "acceptance")
    assert (found.status, word in found.found) == (FAIL, True)


@pytest.mark.parametrize(("share", "status"), [(1.05, PASS), (0.5, FAIL)])
def test_acceptance_is_held_against_the_prediction(tiny: Path, share: float, status: str) -> None:
    seen = verdict(tiny).facts["acceptance"]["tokens_per_step"]
    facts = {"mtp": {"bodies": {"quantized": {"tokens_per_step": {"2": 1 + (seen - 1) / share}}}}}
    found = check(verdict(tiny, prediction=predicted(facts, 2, [])), "acceptance")
    assert found.status == status
    assert "predicted" in found.found


def test_the_floor_of_the_recipe_holds_without_a_prediction(tiny: Path) -> None:
    rate = round(100 * verdict(tiny).facts["acceptance"]["by_position"][0])
    assert check(verdict(tiny, limits=Smoke(min_acceptance_percent=rate - 2)), "acceptance").status == PASS
    assert check(verdict(tiny, limits=Smoke(min_acceptance_percent=rate + 2)), "acceptance").status == FAIL


def flip(margin: float) -> Callable[[dict[str, Any]], None]:
    """The third token of the second prompt is another one, which each run puts `margin` nats behind its own."""

    def change(result: dict[str, Any]) -> None:
        step = result["outputs"][1]["steps"][2]
        mine, other = (7, 8) if result["mtp"] else (8, 7)
        step |= {"id": mine, "logprob": -0.5, "top": [[mine, -0.5], [other, -0.5 - margin / 2]]}
        result["outputs"][1]["token_ids"][2] = mine

    return change


@pytest.mark.parametrize(("margin", "status"), [(0.0, PASS), (0.9, PASS), (1.1, FAIL), (math.inf, FAIL)])
def test_another_text_is_judged_by_the_margin(tiny: Path, margin: float, status: str) -> None:
    assert check(verdict(tiny, flip(margin), flip(margin)), "same text").status == status


@pytest.mark.parametrize(("experts", "share", "status"), [(True, 1 / 6, WARN), (True, 1 / 8, FAIL), (False, 1 / 6, FAIL)])
def test_a_router_s_near_tie_is_allowed_to_few_prompts(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, experts: bool, share: float, status: str
) -> None:
    monkeypatch.setattr(answers, "ROUTED_SHARE", share)  # one of the six recorded prompts is more than an eighth
    expectation = replace(read_expectation(tiny), experts=experts)
    passes = {"plain": recorded("plain", flip(1.4)), "mtp": recorded("mtp", flip(1.4))}
    assert check(judge(Evidence(passes, LIMITS, expectation), "python"), "same text").status == status
    endless = {"plain": recorded("plain", flip(math.inf)), "mtp": recorded("mtp", flip(math.inf))}
    assert check(judge(Evidence(endless, LIMITS, expectation), "python"), "same text").status == FAIL


def test_a_candidate_that_is_not_listed_is_at_least_as_far_as_the_last_one(tiny: Path) -> None:
    def change(result: dict[str, Any]) -> None:
        step = result["outputs"][1]["steps"][2]
        mine = 7 if result["mtp"] else 8
        step |= {"id": mine, "logprob": -0.1, "top": [[mine, -0.1], [99, -3.0]]}
        result["outputs"][1]["token_ids"][2] = mine

    report = verdict(tiny, change, change)
    assert check(report, "same text").status == FAIL
    assert report.facts["agreement"]["largest_margin"] == pytest.approx(5.8)


def test_a_tokenizer_that_splits_text_otherwise_warns(tiny: Path) -> None:
    """The recorded vLLM had transformers 5.19, which does that to the tiny model."""
    passes = {name: recorded(name) for name in ("plain", "mtp")}
    found = check(judged(tiny, passes, LIMITS, "python"), "tokens")
    assert found.status == WARN
    assert "where tokenizer.json makes" in found.found

    def right(result: dict[str, Any]) -> None:
        result["probe"]["ids"] = Tokenizer.from_file(str(tiny / "tokenizer.json")).encode(result["probe"]["text"]).ids

    passes = {name: recorded(name, right) for name in ("plain", "mtp")}
    assert check(judged(tiny, passes, LIMITS, "python"), "tokens").status == PASS


def test_a_not_a_number_fails(tiny: Path) -> None:
    def change(result: dict[str, Any]) -> None:
        result["outputs"][0]["steps"][3]["logprob"] = "nan"

    assert check(verdict(tiny, plain=change), "text").status == FAIL


def test_exclamation_marks_fail_and_name_the_rule(dense: Any) -> None:
    def change(result: dict[str, Any]) -> None:
        for row in result["outputs"]:
            row |= {"token_ids": [0] * 48, "text": "!" * 48}
            row["steps"] = [{"id": 0, "logprob": 0.0, "top": [[0, 0.0]]}] * 48

    dense.drop("lm_head.weight_scale_2")
    dense.save()
    found = check(quantized(change, findings=verify(dense.root).findings), "text")
    assert found.status == FAIL
    assert "!!!!" in found.found
    assert "Q-2" in found.cause


def test_loops_warn(tiny: Path) -> None:
    def change(result: dict[str, Any]) -> None:
        for row in result["outputs"]:
            row["token_ids"] = [5, 6, 7] * 16

    report = verdict(tiny, plain=change)
    assert check(report, "text").status == WARN


def test_a_quantized_checkpoint_as_it_should_be() -> None:
    report = quantized()
    assert report.passed
    assert check(report, "kernel, NVFP4").found.startswith("MarlinNvFp4LinearKernel")
    assert report.facts["kernels"]["FP8"] == ["CutlassFP8ScaledMMLinearKernel"]
    assert check(report, "KV cache").status == PASS


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda r: r["resolved"].update(quantization="modelopt_fp4"), "quantization"),
        (lambda r: r["resolved"].update(architectures=["Qwen3ForCausalLM"]), "architecture"),
        (lambda r: (r["resolved"]["draft"] or {}).update(architectures=["Qwen3_5MoeMTP"]), "draft"),
        (lambda r: r["resolved"].update(kv_cache_dtype="auto"), "KV cache"),
        (lambda r: r["inside"].update(kv_cache={"fp8_e4m3: torch.uint8": 1, "auto: torch.bfloat16": 1}), "KV cache"),
    ],
)
def test_what_vllm_resolved_must_be_what_config_json_says(change: Callable[[Any], Any], name: str) -> None:
    assert check(quantized(change), name).status == FAIL


def test_a_bf16_kv_cache_is_led_back_to_its_rule(dense: Any) -> None:
    dense.q(lambda q: q.pop("kv_cache_scheme"))
    report = quantized(lambda r: r["resolved"].update(kv_cache_dtype="auto"), findings=verify(dense.root).findings)
    assert "CFG-8" in check(report, "KV cache").cause


def test_no_kernel_for_what_is_listed_warns() -> None:
    assert check(quantized(log="nothing\n"), "kernel, NVFP4").status == WARN


@pytest.mark.parametrize(
    "line",
    [
        "WARNING [modelopt.py:2056] In NVFP4 linear, the global weight scale differs across parallel layers (e.g. q_proj).\n",
        "WARNING [modelopt.py:1368] In W4A16_NVFP4 linear, the global weight scale (weight_scale_2) differs across fused\n",
    ],
)
def test_scales_that_differ_in_the_log_warn(line: str) -> None:
    finding = Finding("Q-6", Severity.ERROR, "up", "2", "1", None, "one scale is used for both", "repair")  # type: ignore[arg-type]
    found = check(quantized(log=KERNELS + line, findings=[finding]), "log")
    assert found.status == WARN
    assert "Q-6" in found.cause
    assert found.remedy == "repair"


def test_the_law_book_decides_too(dense: Any) -> None:
    dense.scale("model.language_model.layers.1.mlp.up_proj.weight_scale_2", 4)
    dense.save()
    report = quantized(findings=verify(dense.root).findings)
    assert not report.passed
    assert "Q-6" in check(report, "law book").found


@pytest.mark.parametrize(("shift", "status"), [(0.0, PASS), (-0.2, FAIL), (0.2, PASS)])
def test_likelihood_is_held_against_the_prediction(tiny: Path, shift: float, status: str) -> None:
    rows = recorded("plain").result["prompt_logprobs"]["prompts"]
    nll = (*(-sum(row) / len(row) + shift for row in rows[:4]), None, None)
    report = verdict(tiny, prediction=Prediction(None, nll))
    assert check(report, "likelihood").status == status
    assert report.facts["likelihood"]["tokens"] == sum(map(len, rows))


def test_chance_is_no_likelihood(tiny: Path) -> None:
    def change(result: dict[str, Any]) -> None:
        result["prompt_logprobs"] = {"prompts": [[-7.5] * 95] * 6}  # ln 2048 is 7.62

    assert check(verdict(tiny, plain=change), "likelihood").status == FAIL


def test_a_likelihood_that_could_not_be_had_is_skipped(tiny: Path) -> None:
    found = check(verdict(tiny, plain=lambda r: r.update(prompt_logprobs={"error": "OutOfMemoryError: no room"})), "likelihood")
    assert (found.status, found.found) == (SKIP, "OutOfMemoryError: no room")


@pytest.mark.parametrize(("capability", "tried"), [([12, 0], "tried"), ([9, 0], "not tried")])
def test_it_says_whether_sm_120_was_tried(tiny: Path, capability: list[int], tried: str) -> None:
    gpu = {"name": "NVIDIA GeForce RTX 5090", "capability": capability, "memory_bytes": 2**35}

    def change(result: dict[str, Any]) -> None:
        result["platform"] = {"device": "cuda", "gpus": [gpu, gpu]}

    report = verdict(tiny, change, change)
    assert report.facts["sm_120"] == tried
    assert ("sm_120 was not tried" in check(report, "hardware").found) == (tried == "not tried")
    assert report.facts["gpus"] == [{"name": "NVIDIA GeForce RTX 5090", "capability": ".".join(map(str, capability))}]
    assert check(report, "hardware").status == NOTE
