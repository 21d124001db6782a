"""A small server with OpenAI's completions interface on the loopback device: what a client sends and gets is real HTTP.

It is no language model. `reply` says what a prompt is answered with, `logprob` how likely a token is after others; a test
gives the two. Words stand for tokens where a prompt is text.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL = "loopback"


@dataclass(frozen=True)
class Reply:
    """An answer: its text, why it ended, how many tokens it took, and the reasoning that a parser took out of it.

    `status` other than 200 is an HTTP error with the text as its message; `delay_seconds` passes before it is sent.
    """

    text: str
    finish_reason: str = "stop"
    num_tokens: int | None = None
    reasoning: str | None = None
    status: int = 200
    delay_seconds: float = 0.0


def _silence(_prompt: str) -> Reply:
    return Reply("")


def _even(_before: Sequence[int], _token: int) -> float:
    return -1.0


class LoopbackOpenAI:
    """Serves /v1/models, /v1/completions, /v1/chat/completions, /version and /metrics while the `with` block runs.

    Args:
        reply: The last message's content, or the prompt as text -> what to answer. Returning a str is enough.
        logprob: Token ids before, token id -> log probability, for echoed prompts.
        model: The name of the served model.
        max_model_len: What /v1/models says.
        metrics: The body of /metrics; a string, or a function that makes it.
    """

    def __init__(
        self,
        reply: Callable[[str], "Reply | str"] = _silence,
        logprob: Callable[[Sequence[int], int], float] = _even,
        model: str = MODEL,
        max_model_len: int = 4096,
        metrics: "str | Callable[[], str]" = "",
    ) -> None:
        self.reply, self.logprob, self.model = reply, logprob, model
        self.max_model_len, self.metrics = max_model_len, metrics
        self.requests: list[dict[str, Any]] = []  # bodies, in the order they came, with "path"
        self.most_at_once = 0
        self._now = 0
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    @property
    def root(self) -> str:
        """http://127.0.0.1:PORT"""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def url(self) -> str:
        """The base URL that clients take: `root` and /v1."""
        return f"{self.root}/v1"

    def __enter__(self) -> "LoopbackOpenAI":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def get(self, path: str) -> Any:
        """What a GET is answered with: an object for JSON, a string for text, None for 404."""
        if path == "/v1/models":
            entry = {"id": self.model, "object": "model", "owned_by": "tests", "max_model_len": self.max_model_len}
            return {"object": "list", "data": [entry]}
        if path == "/version":
            return {"version": "0.0.0+loopback"}
        if path == "/metrics":
            return self.metrics() if callable(self.metrics) else self.metrics
        return "" if path == "/health" else None

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Status and answer of a POST."""
        with self._lock:
            self.requests.append({"path": path, **body})
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
        try:
            return self._answer(path, body)
        finally:
            with self._lock:
                self._now -= 1

    def _answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path not in ("/v1/completions", "/v1/chat/completions"):
            return 404, {"error": {"message": f"no such path: {path}", "code": 404}}
        if body.get("model") != self.model:
            return 404, {"error": {"message": f"The model `{body.get('model')}` does not exist.", "code": 404}}
        if path == "/v1/chat/completions":
            reply = self._reply(body["messages"][-1]["content"])
            message = {"role": "assistant", "content": reply.text, "reasoning_content": reply.reasoning}
            choices = [{"index": 0, "message": message, "finish_reason": reply.finish_reason}]
            prompts: list[Any] = [" ".join(m["content"] for m in body["messages"])]
            replies = [reply]
        else:
            given = body["prompt"]
            prompts = given if isinstance(given, list) and given and isinstance(given[0], list | str) else [given]
            replies = [self._reply(p if isinstance(p, str) else " ".join(map(str, p))) for p in prompts]
            choices = [self._choice(i, p, r, body) for i, (p, r) in enumerate(zip(prompts, replies, strict=True))]
        for reply in replies:
            if reply.status != 200:
                return reply.status, {"error": {"message": reply.text, "code": reply.status}}
        took = sum(r.num_tokens if r.num_tokens is not None else len(r.text.split()) for r in replies)
        usage = {"prompt_tokens": sum(map(len, prompts)), "completion_tokens": took}
        return 200, {"id": "cmpl-1", "object": "completion", "model": self.model, "choices": choices, "usage": usage}

    def _reply(self, prompt: str) -> Reply:
        reply = self.reply(prompt)
        reply = Reply(reply) if isinstance(reply, str) else reply
        time.sleep(reply.delay_seconds)
        return reply

    def _choice(self, index: int, prompt: Any, reply: Reply, body: dict[str, Any]) -> dict[str, Any]:
        stop = body.get("stop") or []
        text = reply.text
        for word in [stop] if isinstance(stop, str) else stop:
            text = text.partition(word)[0] if word else text
        choice = {"index": index, "text": text, "finish_reason": reply.finish_reason, "logprobs": None}
        if body.get("echo") and body.get("logprobs") is not None and not isinstance(prompt, str):
            ids = [*prompt, 0]  # one token is asked for beside the prompt
            own = [None, *(self.logprob(ids[:i], ids[i]) for i in range(1, len(ids)))]
            top = [None, *({str(ids[i]): own[i]} for i in range(1, len(ids)))]
            choice["logprobs"] = {"tokens": [str(i) for i in ids], "token_logprobs": own, "top_logprobs": top}
        return choice


def _handler(server: LoopbackOpenAI) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            answer = server.get(self.path)
            self._send(404 if answer is None else 200, answer)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answer = server.post(self.path, body)
            with contextlib.suppress(ConnectionError):  # a client that did not wait
                self._send(*answer)

        def _send(self, status: int, answer: Any) -> None:
            text = isinstance(answer, str)
            data = answer.encode() if text else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/plain" if text else "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            """Quiet."""

    return Handler
