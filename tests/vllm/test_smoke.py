"""The smoke test's runner in a real vLLM, on a CPU: an unquantized model, since no CPU kernel computes NVFP4."""

import dataclasses
from pathlib import Path

import pytest

from quantize.console import Reporter
from quantize.runner import Outcome
from quantize.smoke.failures import explain
from quantize.smoke.launch import run_passes
from quantize.smoke.passes import read_pass
from quantize.smoke.verdict import verdict
from tests.quantize.smoke.cases import CASES, Case
from tests.quantize.smoke.record import OnCPU, run_case, tiny_ask

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize(("model", "draft"), [("tiny", "Qwen3_5MTP"), ("tiny_moe", "Qwen3_5MoeMTP")])
def test_the_tiny_models_pass_with_their_heads_drafting(
    vllm_python: Path, model: str, draft: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    root: Path = request.getfixturevalue(model)
    ask = tiny_ask(root)
    ask = dataclasses.replace(ask, prompts=ask.prompts[:4])
    passes = run_passes(OnCPU(vllm_python), ask, tmp_path, 800.0, Reporter())
    report = verdict(root, passes, ask.recipe, "python")
    assert report.passed, report.failures
    assert report.facts["acceptance"]["by_position"][0] > 0.6  # a head that works; a dead one has 0
    assert report.facts["agreement"]["prompts"] == 4
    assert report.facts["draft_architectures"] == [draft]
    assert report.facts["kv_cache_tokens"] > 1000
    assert passes["plain"].result["dropped"] == []
    assert passes["mtp"].result["inside"]["draft"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_it_refuses_is_explained(vllm_python: Path, tiny: Path, quantized: Outcome, tmp_path: Path, case: Case) -> None:
    why = explain(read_pass("plain", run_case(case, vllm_python, tiny, quantized.out, tmp_path)))
    assert why.kind is case.kind, why
    assert case.word.lower() in why.message.lower()
