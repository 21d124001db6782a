"""The `smoke` stage of a run."""

import json
from pathlib import Path
from typing import Any

import pytest

from assemble.errors import InputError
from quantize.console import Reporter
from quantize.runner import Outcome
from quantize.smoke.command import SmokeError
from quantize.stage import Context, Record, Request, SmokeTarget
from quantize.stages import smoke
from recipes import loader
from tests.quantize.smoke.replay import LoopbackVllm, interpreter, recorded, replaying

RECORD = Record("evaluate", 1, "", {}, {}, {}, {}, 0.0, 0)


def context(root: Path, folder: Path, target: SmokeTarget, records: Any = None, **options: Any) -> Context:
    request = Request("model", folder / "out", loader.load("demo"), smoke=target, **options)
    (folder / "run/smoke").mkdir(parents=True, exist_ok=True)
    return Context(request, folder / "run/smoke", records or {}, None, Reporter(), root)


def test_it_leaves_report_results_and_facts_that_json_can_hold(tiny: Path, tmp_path: Path) -> None:
    left = smoke.run(context(tiny, tmp_path, SmokeTarget(python=replaying(tmp_path))))
    assert set(left.outputs) == {"report.json", "plain.json", "mtp.json"}
    facts = json.loads(json.dumps(dict(left.facts)))
    assert facts["passed"]
    assert facts["reached"] == "python"
    assert facts == json.loads((tmp_path / "run/smoke/report.json").read_text())
    assert str(tmp_path) not in json.dumps(facts)


def test_gpus_and_engine_arguments_reach_the_runner(tiny: Path, tmp_path: Path) -> None:
    target = SmokeTarget(python=replaying(tmp_path), tensor_parallel_size=2, engine='{"max-num-seqs": 3}')
    smoke.run(context(tiny, tmp_path, target))
    engine = json.loads((tmp_path / "run/smoke/mtp.settings.json").read_text())["engine"]
    assert (engine["tensor_parallel_size"], engine["max_num_seqs"]) == (2, 3)


def test_a_remedy_names_the_options_of_run_and_facts_no_path(tiny: Path, tmp_path: Path) -> None:
    python = interpreter(tmp_path, "print('torch.OutOfMemoryError: CUDA out of memory.'); sys.exit(1)")
    with pytest.raises(SmokeError, match="--vllm-args") as failed:
        smoke.run(context(tiny, tmp_path, SmokeTarget(python=python)))
    assert "--engine-args" not in str(failed.value)
    assert str(tmp_path) not in failed.value.summary


def test_a_failed_check_fails_the_stage_and_keeps_the_report(quantized: Outcome, tmp_path: Path) -> None:
    with pytest.raises(SmokeError, match=r"quantization: .*Found None, expected modelopt_mixed"):
        smoke.run(context(quantized.out, tmp_path, SmokeTarget(python=replaying(tmp_path))))
    assert not json.loads((tmp_path / "run/smoke/report.json").read_text())["passed"]
    assert (tmp_path / "run/smoke/mtp.log").is_file()


def test_evaluate_s_prompts_and_prediction_are_used(tiny: Path, tmp_path: Path) -> None:
    evaluated = tmp_path / "run/evaluate"
    evaluated.mkdir(parents=True)
    outputs, scores = recorded("plain").result["outputs"], recorded("plain").result["prompt_logprobs"]["prompts"]
    nll = [-sum(row) / len(row) - 0.01 for row in scores]
    rows = [{"prompt_token_ids": o["prompt_token_ids"], "nll": n} for o, n in zip(outputs, nll, strict=True)]
    (evaluated / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    report = {"mtp": {"bodies": {"quantized": {"tokens_per_step": {"2": 2.3}}}}}
    (evaluated / "report.json").write_text(json.dumps(report))
    with LoopbackVllm(recorded("mtp")) as server:
        server.result = {**server.result, "prompt_logprobs": {"prompts": scores}}
        target = SmokeTarget(endpoint=server.url)
        left = smoke.run(context(tiny, tmp_path, target, records={"evaluate": RECORD}))
    assert left.facts["acceptance"]["predicted_tokens_per_step"] == 2.3
    assert left.facts["likelihood"]["predicted_nll"] == pytest.approx(left.facts["likelihood"]["nll"] - 0.01)


def test_a_vllm_that_is_not_there_is_refused_before_any_work(tmp_path: Path) -> None:
    request = Request("model", tmp_path / "out", loader.load("demo"), smoke=SmokeTarget(python=tmp_path / "python"))
    with pytest.raises(InputError, match="no such program"):
        smoke.check(request)
    assert smoke.check(Request("m", tmp_path, loader.load("demo"), smoke=SmokeTarget(endpoint="http://x"))) != []
