"""What vLLM 0.26 did on an H200 with the tiny model's checkpoint and with sabotaged copies of it (see record_gpu.py)."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.sabotage import SABOTAGES
from quantize.smoke.divergence import compare
from quantize.smoke.evidence import Evidence, Expectation, Prediction
from quantize.smoke.failures import Kind, explain
from quantize.smoke.judge import judge
from quantize.smoke.passes import End, Pass, read_pass
from quantize.smoke.report import FAIL, NOTE, PASS, WARN, Check, Report
from quantize.smoke.verdict import verdict
from recipes.schema import Smoke
from tests.quantize.smoke.record_gpu import GPU

MIXED = Expectation(True, "modelopt_mixed", ("Qwen3_5ForConditionalGeneration",), "Qwen3_5MTP", ("NVFP4", "FP8"))
BREAK: dict[str, Callable[[Any], None]] = {sabotage.name: sabotage.change for sabotage in SABOTAGES}


def seen(name: str, *passes: str) -> dict[str, Pass]:
    return {one: read_pass(one, GPU / f"{name}.{one}.json") for one in passes}


def prediction() -> Prediction:
    kept = json.loads((GPU / "prediction.json").read_text())
    return Prediction(kept["tokens_per_step"], tuple(kept["nll"]))


def good() -> Report:
    evidence = Evidence(seen("good", "plain", "mtp"), Smoke(), MIXED, [], prediction(), source_given=True)
    return judge(evidence, "results")


def check(report: Report, name: str) -> Check:
    return next(c for c in report.checks if c.name == name)


def test_the_good_checkpoint_passes() -> None:
    report = good()
    assert report.passed, report.failures
    assert report.reason == ""
    assert not [c for c in report.checks if c.status == WARN]
    assert report.facts["acceptance"]["tokens_per_step"] == pytest.approx(2.433, abs=1e-3)
    assert report.facts["likelihood"]["nll"] == pytest.approx(1.1956, abs=1e-4)


def test_kernels_and_kv_cache_are_named() -> None:
    report = good()
    assert check(report, "kernel, NVFP4").found == "MarlinNvFp4LinearKernel, 9 layers"
    assert check(report, "kernel, FP8").found == "CutlassFP8ScaledMMLinearKernel, 8 layers"
    assert report.facts["kernels"]["attention"] == ["FLASH_ATTN"]
    assert check(report, "KV cache").found == "fp8_e4m3 (2 x fp8_e4m3: torch.uint8)"  # the body's layer and the head's
    assert report.facts["kv_cache_tokens"] == 1_412_796


def test_the_gpu_is_named_and_that_sm_120_was_not_tried() -> None:
    found = check(good(), "hardware")
    assert (found.status, "1 x NVIDIA H200, compute capability 9.0; sm_120 was not tried" in found.found) == (NOTE, True)
    assert good().facts["sm_120"] == "not tried"


def test_near_ties_are_what_the_margin_calls_them() -> None:
    passes = seen("good", "plain", "mtp")
    comparison = compare(passes["plain"].outputs, passes["mtp"].outputs)
    margins = sorted(d.disagreement for d in comparison.differences)
    assert (comparison.same, len(margins)) == (8, 8)
    assert 0 < margins[0] < 0.07
    assert margins[-1] == pytest.approx(0.375, abs=1e-3)  # BF16 logits: multiples of a thirty-second
    assert not comparison.diverged(Smoke().max_margin_millinats / 1000)
    assert len(comparison.diverged(0.3)) == 1
    assert check(good(), "same text").status == PASS


def test_a_lost_head_loads_writes_text_and_accepts_nothing(dense: Any) -> None:
    BREAK["head_lost"](dense)
    dense.save()
    report = verdict(dense.root, seen("head_lost", "plain", "mtp"), Smoke(), "results", prediction=prediction())
    found = check(report, "acceptance")
    assert (found.status, "0 of 4064" in found.found, "CFG-5" in found.cause) == (FAIL, True, True)
    assert "splice" in found.remedy
    assert check(report, "text, mtp").status == PASS
    assert [c.name for c in report.failures] == ["law book", "acceptance", "finishes"]
    assert report.reason.startswith("law book: CFG-5: mtp.*: found no tensor of an MTP head")
    assert "a draft head is built of uninitialised memory" in report.reason
    assert report.reason.endswith("seen in: acceptance")


def test_a_pass_that_was_cut_short_is_called_that(dense: Any) -> None:
    for name, phase in (("head_lost", "generate"), ("head_fp8_cast", "import")):
        one = seen(name, "plain")["plain"]
        assert one.end is End.UNKNOWN
        why = explain(one)
        assert why.kind is Kind.UNFINISHED
        assert f"ended without an answer{' after 34 s or more' if one.log else ''}, in phase '{phase}'" in why.message
    assert "its log is empty" in why.message
    report = verdict(dense.root, {"plain": one}, Smoke(), "results")
    assert [c.name for c in report.failures] == ["finishes"]
    assert "not judged" in report.failures[0].remedy
    assert report.cut_short


def test_what_only_the_bytes_show_is_said(dense: Any, tiny: Path) -> None:
    BREAK["k_norm_zeroed"](dense)
    dense.save()
    report = verdict(dense.root, seen("good", "plain", "mtp"), Smoke(), "results", source=tiny, prediction=prediction())
    assert [c.name for c in report.failures] == ["law book"]
    assert report.reason.startswith("law book: MTP-3: mtp.layers.0.self_attn.k_norm.weight: found differs")
    assert report.reason.endswith("no other check that could be made shows it")


def test_a_bf16_lm_head_stops_the_load(dense: Any) -> None:
    BREAK["lm_head_bf16"](dense)
    dense.save()
    one = seen("lm_head_bf16", "plain")["plain"]
    assert explain(one).kind is Kind.CHECKPOINT
    report = verdict(dense.root, {"plain": one, "mtp": replace(one, name="mtp")}, Smoke(), "results")
    found = check(report, "loads")
    assert "The size of tensor a (128) must match the size of tensor b (256)" in found.found
    assert "Q-2" in found.cause
    assert check(report, "loads, mtp").found == "the checkpoint is at fault: the same again"


def test_a_head_with_scales_stops_the_load(dense: Any) -> None:
    BREAK["head_fp8_scaled"](dense)
    dense.save()
    report = verdict(dense.root, seen("head_fp8_scaled", "mtp"), Smoke(), "results")
    found = check(report, "loads, mtp")
    assert "There is no module or parameter named 'fc.weight_scale'" in found.found
    assert "MTP-2" in found.cause
    assert report.reason.startswith("law book: ")


def test_scales_drawn_apart_are_warned_of_and_seen_in_acceptance_and_likelihood(dense: Any) -> None:
    BREAK["gate_up_apart"](dense)
    dense.save()
    passes = seen("gate_up_apart", "plain", "mtp")
    report = verdict(dense.root, passes, Smoke(), "results", prediction=prediction())
    warned = check(report, "log")
    assert (warned.status, "differs across fused parallel layers" in warned.found) == (WARN, True)
    for name in ("acceptance", "likelihood"):
        found = check(report, name)
        assert (found.status, "Q-6" in found.cause) == (FAIL, True)
    assert "the head drafts for" in check(report, "acceptance").cause
    assert report.reason.endswith("seen in: acceptance, likelihood")


def test_warnings_of_a_log_explain_no_failure() -> None:
    """A log of a vLLM that did well, and one more warning that reads like a failure."""
    one = read_pass("plain", GPU / "good.plain.json")
    line = "WARNING 11-29 23:15:07 [interface.py:1] Failed to import from vllm._C: undefined symbol: x\n"
    assert explain(Pass("plain", {"phase": "load"}, one.log + line, End.UNKNOWN)).kind is Kind.UNFINISHED
    error = "(EngineCore pid=1) ERROR 11-29 23:15:07 [core.py:1] KeyError: 'never seen'\n"
    last = "RuntimeError: Engine core initialization failed. See root cause above.\n"
    why = explain(Pass("plain", {"phase": "load"}, one.log + error + line + last, End.UNKNOWN))
    assert (why.kind, why.message) == (Kind.UNKNOWN, "KeyError: 'never seen'")
