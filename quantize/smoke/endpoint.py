"""A server that runs already: asked by vLLM's OpenAI API, and counted by its `/metrics`.

What comes out has the shape of the runner's result, so the same checks judge it. A server says less: neither its GPU nor its
kernels, and it drafts or does not; to compare the text with and without the head, two servers are needed.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import requests

from assemble.errors import InputError
from quantize.console import Reporter
from quantize.smoke.passes import End, Pass
from quantize.smoke.settings import CANARY, LOGPROBS, MTP, PLAIN, PROBE, PROTOCOL, Ask

TIMEOUT_SECONDS = 600.0  # for one answer
AT_ONCE = 8
# vLLM 0.26 and 0.32 v1/spec_decode/metrics.py SpecDecodingProm; prometheus_client appends _total to counters
COUNTERS = {
    "drafts": "vllm:spec_decode_num_drafts_total",
    "draft_tokens": "vllm:spec_decode_num_draft_tokens_total",
    "accepted_tokens": "vllm:spec_decode_num_accepted_tokens_total",
}
BY_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
CACHE = "vllm:cache_config_info"  # vLLM 0.26 v1/metrics/loggers.py log_metrics_info
_SAMPLE = re.compile(r"^(?P<name>[\w:]+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class EndpointError(InputError):
    """A server that cannot be reached, or that does not answer as vLLM does."""


class Server:
    """One vLLM server. `url` may end in /v1 or not."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._session = requests.Session()
        self._session.trust_env = False  # a proxy for the world outside is not for a server next door

    def get(self, path: str) -> requests.Response:
        """A GET that was answered with 200."""
        return self._checked("GET", path, None)

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """A POST's answer."""
        answer = self._checked("POST", path, body)
        try:
            return answer.json()
        except ValueError as error:
            raise EndpointError(f"{self.url}{path} did not answer with JSON. Is it a vLLM server?") from error

    def _checked(self, method: str, path: str, body: Mapping[str, Any] | None) -> requests.Response:
        try:
            answer = self._session.request(method, self.url + path, json=body, timeout=TIMEOUT_SECONDS)
        except requests.Timeout as error:
            raise EndpointError(f"{self.url}{path} did not answer within {TIMEOUT_SECONDS:.0f} s.") from error
        except requests.RequestException as error:
            raise EndpointError(
                f"{self.url} cannot be reached ({type(error).__name__}). Start the server, or give its address: --endpoint http://HOST:8000"
            ) from error
        if answer.status_code != 200:
            text = " ".join(answer.text.split())[:300]
            raise EndpointError(
                f"{self.url}{path} answered {answer.status_code}: {text}. vLLM 0.23 or newer is expected there."
            )
        return answer

    def metrics(self) -> str:
        """Prometheus text."""
        return self.get("/metrics").text

    def model(self) -> str:
        """The name of the model that it serves."""
        answer = self.get("/v1/models")
        try:
            return str(answer.json()["data"][0]["id"])
        except (ValueError, LookupError, TypeError) as error:
            raise EndpointError(f"{self.url}/v1/models names no model. Is it a vLLM server?") from error

    def version(self) -> str | None:
        """vLLM's version, where it says."""
        try:
            return str(self.get("/version").json()["version"])
        except (EndpointError, ValueError, KeyError):
            return None


def run_endpoint(url: str, ask: Ask, reporter: Reporter, plain_url: str | None = None) -> dict[str, Pass]:
    """Asks a server that drafts, and where there is one also a server of the same checkpoint that does not."""
    urls = {PLAIN: plain_url, MTP: url}
    first = PLAIN if plain_url else MTP
    return {name: _asked(name, Server(at), ask, reporter, scored=name == first) for name, at in urls.items() if at}


def _asked(name: str, server: Server, ask: Ask, reporter: Reporter, *, scored: bool) -> Pass:
    model = server.model()
    before = server.metrics()
    canary = _chat(server, model, CANARY, ask.recipe.max_new_tokens)
    middle = server.metrics()
    prompts = [_tokenized(server, model, prompt) for prompt in ask.prompts]
    outputs: list[dict[str, Any]] = []
    with reporter.task(f"ask {server.url}", len(prompts)) as progress, ThreadPoolExecutor(AT_ONCE) as pool:
        for output in pool.map(lambda prompt: _generated(server, model, prompt, ask.recipe.max_new_tokens), prompts):
            outputs.append(output)
            progress(1)
    after = server.metrics()
    result: dict[str, Any] = {
        "protocol": PROTOCOL,
        "ok": True,
        "mtp": counters(after) is not None,
        "phase": "done",
        "vllm": server.version(),
        "resolved": _resolved(before),
        "canary": canary,
        "probe": {"text": PROBE, "ids": _tokens(server, model, PROBE)},
        "outputs": outputs,
        "speculation": _between(counters(middle), counters(after)),
        "prompt_logprobs": _likelihood(server, model, outputs) if scored else None,
    }
    return Pass(name, result, "", End.FINISHED)


def _tokenized(server: Server, model: str, prompt: Mapping[str, Any]) -> Mapping[str, Any]:
    if "text" not in prompt:
        return prompt
    return {**prompt, "prompt_token_ids": _tokens(server, model, prompt["text"])[: prompt.get("cut_tokens")]}


def _tokens(server: Server, model: str, text: str) -> list[int]:
    return [int(i) for i in server.post("/tokenize", {"model": model, "prompt": text, "add_special_tokens": False})["tokens"]]


def _generated(server: Server, model: str, prompt: Mapping[str, Any], max_tokens: int) -> dict[str, Any]:
    if "messages" in prompt:
        return _chat(server, model, prompt, max_tokens)
    body = _sampling(model, prompt, max_tokens) | {"prompt": prompt["prompt_token_ids"], "logprobs": LOGPROBS}
    choice = server.post("/v1/completions", body)["choices"][0]
    lp = choice.get("logprobs") or {}
    rows = zip(lp.get("tokens") or [], lp.get("token_logprobs") or [], lp.get("top_logprobs") or [], strict=True)
    steps = [_step(token, logprob, (top or {}).items()) for token, logprob, top in rows]
    return _output(prompt["prompt_token_ids"], steps, choice, choice["text"])


def _chat(server: Server, model: str, prompt: Mapping[str, Any], max_tokens: int) -> dict[str, Any]:
    most = prompt.get("max_tokens", max_tokens)
    body = _sampling(model, prompt, most) | {"messages": prompt["messages"], "logprobs": True, "top_logprobs": LOGPROBS}
    answer = server.post("/v1/chat/completions", body)
    choice = answer["choices"][0]
    rows = (choice.get("logprobs") or {}).get("content") or []
    steps = [_step(r["token"], r["logprob"], ((t["token"], t["logprob"]) for t in r["top_logprobs"])) for r in rows]
    message = choice["message"]
    text = (message.get("reasoning") or message.get("reasoning_content") or "") + (message.get("content") or "")
    return _output(answer.get("prompt_token_ids") or [], steps, choice, text)


def _sampling(model: str, prompt: Mapping[str, Any], max_tokens: int) -> dict[str, Any]:
    """Greedy; ids come back as ids, since two tokens may have the same text."""
    return {
        "model": model,
        "temperature": 0,
        "max_tokens": max_tokens,
        "ignore_eos": bool(prompt.get("ignore_eos")),
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }


def _output(prompt: Sequence[int], steps: list[dict[str, Any]], choice: Mapping[str, Any], text: str) -> dict[str, Any]:
    ids = choice.get("token_ids") or [step["id"] for step in steps]
    finish = choice.get("finish_reason")
    return {"prompt_token_ids": list(prompt), "token_ids": ids, "text": text, "finish_reason": finish, "steps": steps}


def _step(token: str, logprob: float, top: Any) -> dict[str, Any]:
    return {"id": _id(token), "logprob": logprob, "top": [[_id(t), value] for t, value in top]}


def _id(token: str) -> int:
    """`token_id:123` is 123 (vLLM's return_tokens_as_token_ids)."""
    text = token.removeprefix("token_id:")
    if not text.isdigit():
        raise EndpointError(f"the server gives tokens as text ({token!r}), not as ids. vLLM 0.23 or newer is expected there.")
    return int(text)


def _likelihood(server: Server, model: str, outputs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    rows = []
    for output in outputs:
        ids = output["prompt_token_ids"]
        body = {"model": model, "prompt": ids, "temperature": 0, "max_tokens": 1, "prompt_logprobs": 1}
        try:
            scored = server.post("/v1/completions", body)["choices"][0]["prompt_logprobs"]
        except EndpointError as error:
            return {"error": str(error)}
        rows.append([scored[i][str(ids[i])]["logprob"] for i in range(1, len(ids))])
    return {"prompts": rows}


def samples(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """Every sample of Prometheus text: name, labels, value."""
    for match in _SAMPLE.finditer(text):
        try:
            yield match["name"], dict(_LABEL.findall(match["labels"] or "")), float(match["value"])
        except ValueError:
            continue


def counters(text: str) -> dict[str, Any] | None:
    """vLLM's counters of drafts, all engines together; None where it does not draft."""
    sums: dict[str, float] = {}
    positions: dict[int, float] = {}
    for name, labels, value in samples(text):
        for key, counter in COUNTERS.items():
            if name == counter:
                sums[key] = sums.get(key, 0) + value
        if name == BY_POSITION and labels.get("position", "").isdigit():
            position = int(labels["position"])
            positions[position] = positions.get(position, 0) + value
    if "drafts" not in sums:
        return None
    whole = {key: int(sums.get(key, 0)) for key in COUNTERS}
    return whole | {"accepted_by_position": [int(positions[p]) for p in sorted(positions)]}


def _between(before: dict[str, Any] | None, after: dict[str, Any] | None) -> dict[str, Any] | None:
    if after is None:
        return None
    start: Mapping[str, Any] = before or {}
    earlier = start.get("accepted_by_position") or [0] * len(after["accepted_by_position"])
    counts = {key: after[key] - start.get(key, 0) for key in COUNTERS}
    positions = [a - b for a, b in zip(after["accepted_by_position"], earlier, strict=True)]
    return counts | {"accepted_by_position": positions}


def _resolved(text: str) -> dict[str, Any]:
    """What /metrics says of the config: the KV cache's dtype."""
    labels = next((labels for name, labels, _ in samples(text) if name == CACHE), {})
    return {"kv_cache_dtype": labels["cache_dtype"]} if "cache_dtype" in labels else {}
