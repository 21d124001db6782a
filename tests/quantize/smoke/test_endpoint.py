"""A running server: over real HTTP, with the answers and counters of a real vLLM."""

import socket
from pathlib import Path
from typing import Any

import pytest

from quantize.console import Reporter
from quantize.smoke.endpoint import EndpointError, counters, run_endpoint, samples
from quantize.smoke.settings import Ask
from quantize.smoke.verdict import verdict
from recipes.schema import Smoke
from tests.loopback_openai import LoopbackOpenAI
from tests.quantize.smoke.replay import LoopbackVllm, recorded

LIMITS = Smoke(max_new_tokens=48)


def ask(checkpoint: Path) -> Ask:
    """The recorded prompts, as ids."""
    rows = recorded("plain").result["outputs"]
    return Ask(checkpoint, LIMITS, [{"prompt_token_ids": row["prompt_token_ids"], "ignore_eos": True} for row in rows])


def test_two_servers_get_the_verdict_that_the_runner_gets(tiny: Path) -> None:
    with LoopbackVllm(recorded("mtp")) as drafting, LoopbackVllm(recorded("plain")) as plain:
        passes = run_endpoint(drafting.url, ask(tiny), Reporter(), plain.root)
    seen = verdict(tiny, passes, LIMITS, "endpoint")
    told = verdict(tiny, {name: recorded(name) for name in ("plain", "mtp")}, LIMITS, "python")
    assert seen.passed
    for key in ("acceptance", "agreement", "likelihood", "canary"):
        assert seen.facts[key] == told.facts[key], key
    assert seen.facts["kv_cache_dtype"] == "fp8_e4m3"
    assert seen.facts["vllm"] == "0.0.0+loopback"
    assert drafting.asked[0]["temperature"] == 0
    assert all(body["ignore_eos"] for body in drafting.asked)


def test_counters_are_what_the_prompts_added(tiny: Path) -> None:
    with LoopbackVllm(recorded("mtp")) as server:
        passes = run_endpoint(server.url, ask(tiny), Reporter())
    assert passes["mtp"].result["speculation"] == recorded("mtp").result["speculation"]
    assert list(passes) == ["mtp"]


def test_a_server_without_speculation_fails(tiny: Path) -> None:
    with LoopbackVllm(recorded("plain")) as server:
        report = verdict(tiny, run_endpoint(server.url, ask(tiny), Reporter()), LIMITS, "endpoint")
    assert [c.name for c in report.failures] == ["acceptance"]
    assert "--speculative-config" in report.failures[0].remedy


def test_a_bf16_kv_cache_shows_in_metrics(quantized: object) -> None:
    root = quantized.out  # type: ignore[attr-defined]
    with LoopbackVllm(recorded("mtp"), kv_cache_dtype="auto") as server:
        report = verdict(root, run_endpoint(server.url, ask(root), Reporter()), LIMITS, "endpoint")
    assert "KV cache" in [c.name for c in report.failures]


def test_no_server_is_said_with_the_address(tiny: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(EndpointError, match=f"127.0.0.1:{port} cannot be reached"):
        run_endpoint(f"http://127.0.0.1:{port}/v1", ask(tiny), Reporter())


def test_another_server_is_not_taken_for_vllm(tiny: Path) -> None:
    with Other() as server, pytest.raises(EndpointError, match="ids"):
        run_endpoint(server.url, ask(tiny), Reporter())


class Other(LoopbackOpenAI):
    """It answers, but knows nothing of ids."""

    def _answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        content = [{"token": "Paris", "logprob": -0.1, "top_logprobs": []}]
        message = {"role": "assistant", "content": "Paris"}
        return 200, {"choices": [{"message": message, "finish_reason": "stop", "logprobs": {"content": content}}]}


def test_text_is_tokenized_by_the_server_and_cut(tiny: Path) -> None:
    lengths = [len(row["prompt_token_ids"]) for row in recorded("mtp").result["outputs"]]
    prompts = [{"text": str(i), "cut_tokens": length, "ignore_eos": True} for i, length in enumerate(lengths)]
    with LoopbackVllm(recorded("mtp")) as server:
        passes = run_endpoint(server.url, Ask(tiny, LIMITS, prompts), Reporter())
    assert [len(output.prompt) for output in passes["mtp"].outputs] == lengths


def test_an_error_of_the_server_is_quoted(tiny: Path) -> None:
    with LoopbackVllm(recorded("mtp")) as server, pytest.raises(EndpointError, match=r"400: .*not a recorded prompt"):
        run_endpoint(server.url, Ask(tiny, LIMITS, [{"prompt_token_ids": [1, 2, 3]}]), Reporter())


def test_prometheus_text_is_read() -> None:
    text = (
        "# HELP vllm:x X\n# TYPE vllm:x counter\n"
        'vllm:spec_decode_num_drafts_total{engine="0",model_name="a\\"b"} 5.0\n'
        'vllm:spec_decode_num_drafts_total{engine="1",model_name="a"} 6.0\n'
        'vllm:spec_decode_num_draft_tokens_total{engine="0"} 2.2e+01\n'
        'vllm:spec_decode_num_accepted_tokens_total{engine="0"} 7.0\n'
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 2.0\n'
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 5.0\n'
        "process_cpu_seconds_total 1.5\nbroken line\n"
    )
    assert counters(text) == {"drafts": 11, "draft_tokens": 22, "accepted_tokens": 7, "accepted_by_position": [5, 2]}
    assert next(samples(text))[1] == {"engine": "0", "model_name": 'a\\"b'}
    assert counters("process_cpu_seconds_total 1.5\n") is None
