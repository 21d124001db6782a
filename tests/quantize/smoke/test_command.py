"""`python -m quantize smoke`, as a user runs it."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from quantize.__main__ import app
from quantize.runner import Outcome
from tests.quantize.smoke.replay import RECORDED, LoopbackVllm, interpreter, recorded, replaying


def smoke(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["smoke", *map(str, arguments)])


def test_a_good_checkpoint_passes(tiny: Path, tmp_path: Path) -> None:
    done = smoke(tiny, "--vllm-python", replaying(tmp_path), "--out", tmp_path / "run")
    assert done.exit_code == 0, done.output
    assert "passes the smoke test" in done.stdout
    assert "tokens a step" in done.stdout
    assert "  mtp: starting vLLM" in done.stderr
    assert json.loads((tmp_path / "run/report.json").read_text())["passed"]


def test_json_is_one_object(tiny: Path, tmp_path: Path) -> None:
    done = smoke(tiny, "--result", RECORDED, "--json")
    told = json.loads(done.stdout)
    assert told["passed"] is True
    assert told["reached"] == "results"
    assert told["acceptance"]["num_speculative_tokens"] == 2
    assert {check["name"] for check in told["checks"]} >= {"loads", "loads, mtp", "acceptance", "same text"}


def test_a_failed_check_exits_with_1_and_says_what_to_do(quantized: Outcome) -> None:
    done = smoke(quantized.out, "--result", RECORDED / "plain.json", "--result", RECORDED / "mtp.json")
    assert done.exit_code == 1  # the recorded vLLM served an unquantized model
    assert "fail: quantization" in done.stdout
    assert "FAILS the smoke test" in done.stdout


def test_a_vllm_that_dies_exits_with_1(tiny: Path, tmp_path: Path) -> None:
    python = interpreter(tmp_path, "print('torch.OutOfMemoryError: CUDA out of memory.'); sys.exit(1)")
    done = smoke(tiny, "--vllm-python", python, "--out", tmp_path / "run")
    assert done.exit_code == 1
    assert "out of memory" in done.stdout
    assert "--engine-args" in done.stdout


def test_prepare_writes_what_another_machine_needs(tiny: Path, tmp_path: Path) -> None:
    engine_args = '{"seed": null, "max-num-seqs": 3}'
    done = smoke(tiny, "--prepare", tmp_path / "kit", "--cuda-graphs", "--tp", 2, "--engine-args", engine_args)
    assert done.exit_code == 0
    assert "python3 smoke_runner.py graphs.settings.json graphs.json --model CHECKPOINT" in done.stdout
    engine = json.loads((tmp_path / "kit/graphs.settings.json").read_text())["engine"]
    assert (engine["enforce_eager"], engine["tensor_parallel_size"], engine["max_num_seqs"]) == (False, 2, 3)
    assert "seed" not in engine
    assert "quantization" not in engine
    assert json.loads((tmp_path / "kit/mtp.settings.json").read_text())["engine"]["enforce_eager"] is True


def test_a_server_is_asked(tiny: Path, tmp_path: Path) -> None:
    rows = [json.dumps({"prompt_token_ids": row["prompt_token_ids"]}) for row in recorded("mtp").result["outputs"]]
    (tmp_path / "prompts.jsonl").write_text("\n".join(rows))
    with LoopbackVllm(recorded("mtp")) as server:
        done = smoke(tiny, "--endpoint", server.url, "--prompts", tmp_path / "prompts.jsonl", "--out", tmp_path / "run")
    assert done.exit_code == 0, done.output
    assert "acceptance" in done.stdout


def test_a_prediction_is_used(tiny: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    report.write_text(json.dumps({"mtp": {"bodies": {"quantized": {"tokens_per_step": {"2": 2.99}}}}}))
    done = smoke(tiny, "--result", RECORDED, "--prediction", report)
    assert done.exit_code == 1
    assert "predicted 2.99" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--docker", "--endpoint", "http://x"], "exclude each other"),
        (["--plain-endpoint", "http://x"], "goes with --endpoint"),
        (["--result", "nowhere.json"], "there is no result"),
        (["--vllm-python", "/no/such/python"], "no such program"),
        (["--engine-args", "[1]", "--result", str(RECORDED)], "must be a JSON object"),
        (["--engine-args", "{", "--result", str(RECORDED)], "is not JSON"),
        (["--prompts", "nowhere.jsonl", "--result", str(RECORDED)], "cannot be read"),
        (["--endpoint", "http://127.0.0.1:9"], "cannot be reached"),
    ],
)
def test_bad_input_exits_with_2(tiny: Path, arguments: list[str], text: str) -> None:
    done = smoke(tiny, *arguments)
    assert done.exit_code == 2, done.output
    assert text in done.stderr


def test_a_folder_that_is_no_checkpoint_exits_with_2(tmp_path: Path) -> None:
    done = smoke(tmp_path, "--result", RECORDED)
    assert done.exit_code == 2
    assert "not a checkpoint" in done.stderr


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("", "is empty"),
        ("[1, 2]", "expected an object"),
        ("{", "is not JSON"),
        ('{"question": "?"}', "keys found: question"),
        ('{"prompt_token_ids": [1, -1]}', "usable form"),
    ],
)
def test_prompts_that_are_none_are_refused_with_their_line(tiny: Path, tmp_path: Path, content: str, text: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    done = smoke(tiny, "--result", RECORDED, "--prompts", path)
    assert done.exit_code == 2
    assert text in done.stderr


def test_results_of_another_protocol_or_twice_the_same_are_refused(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"protocol": 99}')
    assert "protocol 1" in smoke(tiny, "--result", tmp_path).stderr
    assert "second result" in smoke(tiny, "--result", RECORDED, "--result", RECORDED / "mtp.json").stderr
