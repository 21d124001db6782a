"""What a real vLLM left (see record.py), to judge, to alter, and to serve again over HTTP or as an interpreter."""

import copy
import json
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quantize.smoke.passes import End, Pass, read_pass
from tests.loopback_openai import LoopbackOpenAI

RECORDED = Path(__file__).parent / "recorded"
Change = Callable[[dict[str, Any]], Any]


def recorded(name: str, change: Change = lambda _: None, log: str = "") -> Pass:
    """A recorded pass, its result changed and its log lengthened."""
    one = read_pass(name, RECORDED / f"{name}.json")
    result = copy.deepcopy(dict(one.result))
    change(result)
    return Pass(name, result, one.log + log, End.FINISHED)


def failure(path: Path) -> Pass:
    """A recorded failure."""
    kept = json.loads(path.read_text())
    return Pass("plain", kept["result"], kept["log"], End.FAILED if kept["result"].get("error") else End.DIED)


def interpreter(folder: Path, body: str) -> Path:
    """A program that stands where `--vllm-python` names one. It is called as: runner, settings, result, --model, checkpoint."""
    path = folder / "python-with-vllm"
    path.write_text(f"#!{sys.executable}\nimport json, os, pathlib, signal, subprocess, sys, time\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def replaying(folder: Path, results: Path = RECORDED) -> Path:
    """An interpreter that answers each pass with what a real vLLM answered."""
    return interpreter(
        folder,
        "settings, result = map(pathlib.Path, sys.argv[2:4])\n"
        f"kept = pathlib.Path({str(results)!r})\n"
        "assert json.loads(settings.read_text())['protocol'] == 1\n"
        "for suffix in ('.json', '.log'):\n"
        "    result.with_suffix(suffix).write_text((kept / result.with_suffix(suffix).name).read_text())",
    )


class LoopbackVllm(LoopbackOpenAI):
    """Serves the continuations of a recorded pass as vLLM does: ids as ids, counters in /metrics."""

    def __init__(self, one: Pass, kv_cache_dtype: str = "fp8_e4m3") -> None:
        super().__init__(metrics=self.counters)
        self.result, self.kv_cache_dtype = one.result, kv_cache_dtype
        self.asked: list[dict[str, Any]] = []

    def counters(self) -> str:
        """The text of /metrics: the counters grow when all prompts were answered."""
        lines = [f'vllm:cache_config_info{{block_size="16",cache_dtype="{self.kv_cache_dtype}",engine="0"}} 1.0']
        spec = self.result["speculation"]
        if spec is None:
            return "\n".join(lines) + "\n"
        done = len(self.asked) >= len(self.result["outputs"])
        scale = 1 if done else 0
        names = (("drafts", "drafts"), ("draft_tokens", "draft_tokens"), ("accepted_tokens", "accepted_tokens"))
        for name, key in names:
            lines.append(f'vllm:spec_decode_num_{name}_total{{engine="0",model_name="m"}} {float(7 + scale * spec[key])}')
            lines.append(f'vllm:spec_decode_num_{name}_created{{engine="0",model_name="m"}} 1.7e+09')
        for position, count in enumerate(spec["accepted_by_position"]):
            label = f'engine="0",model_name="m",position="{position}"'
            lines.append(f"vllm:spec_decode_num_accepted_tokens_per_pos_total{{{label}}} {float(3 + scale * count)}")
        return "\n".join(lines) + "\n"

    def _answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/tokenize":  # a text stands for the prompt of its number
            if body["prompt"] == self.result["probe"]["text"]:
                return 200, {"tokens": self.result["probe"]["ids"]}
            return 200, {"tokens": self.result["outputs"][int(body["prompt"])]["prompt_token_ids"] + [1, 2, 3]}
        if path == "/v1/chat/completions":
            return 200, self._chat(self.result["canary"])
        if body.get("prompt_logprobs"):
            return 200, {"choices": [{"prompt_logprobs": self._scores(body["prompt"])}]}
        row = next((r for r in self.result["outputs"] if r["prompt_token_ids"] == body["prompt"]), None)
        if row is None or not body.get("return_tokens_as_token_ids"):
            return 400, {"error": {"message": "not a recorded prompt"}}
        self.asked.append(body)
        tops = [{f"token_id:{i}": value for i, value in step["top"]} for step in row["steps"]]
        logprobs = {
            "tokens": [f"token_id:{step['id']}" for step in row["steps"]],
            "token_logprobs": [step["logprob"] for step in row["steps"]],
            "top_logprobs": tops,
        }
        kept = {key: row[key] for key in ("text", "finish_reason", "token_ids")}
        return 200, {"choices": [{**kept, "logprobs": logprobs}]}

    def _chat(self, row: dict[str, Any]) -> dict[str, Any]:
        content = [
            {
                "token": f"token_id:{s['id']}",
                "logprob": s["logprob"],
                "top_logprobs": [{"token": f"token_id:{i}", "logprob": value} for i, value in s["top"]],
            }
            for s in row["steps"]
        ]
        message = {"role": "assistant", "content": row["text"], "reasoning_content": None}
        kept = {key: row[key] for key in ("finish_reason", "token_ids")}
        choice = {**kept, "message": message, "logprobs": {"content": content}}
        return {"prompt_token_ids": row["prompt_token_ids"], "choices": [choice]}

    def _scores(self, prompt: list[int]) -> list[Any]:
        at = next(i for i, row in enumerate(self.result["outputs"]) if row["prompt_token_ids"] == prompt)
        own = (self.result["prompt_logprobs"] or {"prompts": {}})["prompts"][at]
        return [None, *({str(token): {"logprob": value}} for token, value in zip(prompt[1:], own, strict=True))]
