"""A server with OpenAI's interface: which model it serves, and one chat request."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from assemble.errors import InputError
from quantize.errors import CheckFailedError

CONNECT_SECONDS = 10
KEY = "OPENAI_API_KEY"  # sent where it is set; a server started with --api-key wants it
SHOWN = 300


class EndpointError(InputError):
    """No such server, or none that can be used."""


class RequestError(CheckFailedError):
    """The server stopped answering, or refused a request, in the middle of a benchmark."""


@dataclass(frozen=True)
class Served:
    """What a server serves.

    Attributes:
        url: Its base URL, `http://HOST:PORT/v1`.
        model: The model's name.
        root: Where the server says that it loaded the model from; None where it does not say.
        max_model_len: Tokens of prompt and completion together; None where it does not say.
    """

    url: str
    model: str
    root: str | None
    max_model_len: int | None


@dataclass(frozen=True)
class Completion:
    """An answer.

    Attributes:
        text: What the message holds.
        reasoning: What a reasoning parser took out of it.
        finish_reason: `stop`, `length`, or another of the server's words.
        num_tokens: Completion tokens, reasoning included.
    """

    text: str
    reasoning: str
    finish_reason: str
    num_tokens: int


def connect(endpoint: str, model: str | None) -> Served:
    """Asks a server what it serves.

    Args:
        endpoint: Its base URL, with or without `/v1`.
        model: The name to ask for; None: the only one, or the first.

    Raises:
        EndpointError: not a URL, nobody answers, another kind of answer, or no such model.
    """
    url = _base(endpoint)
    answer = _get(f"{url}/models")
    entries = answer.get("data") if isinstance(answer, Mapping) else None
    if not isinstance(entries, list) or not all(isinstance(e, Mapping) and isinstance(e.get("id"), str) for e in entries):
        raise EndpointError(f"{url}/models did not answer with a list of models: is this an OpenAI-compatible server?")
    names = [entry["id"] for entry in entries]
    if not names or (model is not None and model not in names):
        raise EndpointError(f"{url} serves {', '.join(names) or 'no model'}, not {model or 'one'}. Give --model one of these.")
    entry = entries[names.index(model) if model is not None else 0]
    length = entry.get("max_model_len")
    return Served(url, entry["id"], entry.get("root"), length if type(length) is int else None)


def chat(served: Served, prompt: str, options: Mapping[str, Any], timeout_seconds: float) -> Completion:
    """Sends one chat request and waits for its whole answer. Never sends it twice.

    Raises:
        RequestError: the server refused, answered with something else, or not in time.
    """
    import requests

    body = {"model": served.model, "messages": [{"role": "user", "content": prompt}], **options}
    try:
        response = requests.post(
            f"{served.url}/chat/completions", json=body, headers=_headers(), timeout=(CONNECT_SECONDS, timeout_seconds)
        )
    except requests.Timeout as error:
        raise RequestError(f"{served.url} did not answer within {timeout_seconds:g} s") from error
    except requests.RequestException as error:
        raise RequestError(f"{served.url} stopped answering: {_reason(error)}") from error
    if response.status_code != 200:
        raise RequestError(f"{served.url} refused a request with status {response.status_code}: {_message(response)}")
    try:
        answer = response.json()
        choice = answer["choices"][0]
        message = choice["message"]
        reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
        tokens = int((answer.get("usage") or {}).get("completion_tokens") or 0)
        return Completion(message.get("content") or "", reasoning, str(choice["finish_reason"]), tokens)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise RequestError(f"{served.url} answered with something that is not a chat completion: {error!r}") from error


def _base(endpoint: str) -> str:
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise EndpointError(f"--endpoint {endpoint} is not a URL such as http://127.0.0.1:8000/v1")
    url = endpoint.rstrip("/")
    for tail in ("/chat/completions", "/completions", "/models"):
        url = url.removesuffix(tail)
    return url if url.endswith("/v1") else f"{url}/v1"


def _get(url: str) -> Any:
    import requests

    try:
        response = requests.get(url, headers=_headers(), timeout=CONNECT_SECONDS)
    except requests.RequestException as error:
        text = f"nobody answers at {url} ({_reason(error)}). Start the server first: vllm serve CHECKPOINT, and see --endpoint."
        raise EndpointError(text) from error
    if response.status_code == 401:
        raise EndpointError(f"{url} wants an API key (status 401). Put it into the environment variable {KEY}.")
    if response.status_code != 200:
        raise EndpointError(f"{url} answered with status {response.status_code}: is this an OpenAI-compatible server?")
    try:
        return response.json()
    except ValueError as error:
        raise EndpointError(f"{url} did not answer with JSON: is this an OpenAI-compatible server?") from error


def _headers() -> dict[str, str]:
    key = os.environ.get(KEY)
    return {"Authorization": f"Bearer {key}"} if key else {}


def _reason(error: Exception) -> str:
    cause: BaseException = error
    while (inner := cause.__cause__ or cause.__context__) is not None:
        cause = inner
    return str(cause)[:SHOWN] or type(cause).__name__


def _message(response: Any) -> str:
    try:
        answer = response.json()
        return str(answer.get("message") or answer["error"]["message"])[:SHOWN]
    except (ValueError, KeyError, TypeError, AttributeError):
        return str(response.text)[:SHOWN]
