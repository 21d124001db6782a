"""What both halves of the loopback Hub are made of: requests, answers, repositories."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path


@dataclass
class Request:
    """What a client asked, and how many bytes of body it was sent."""

    method: str
    path: str
    range: str | None
    token: str | None
    status: int = 0
    sent: int = 0
    received: int = 0


@dataclass
class Answer:
    """A response to be sent; `cut` says after how many bytes of the body the connection drops."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    cut: int | None = None


@dataclass
class Repo:
    """A repository: each commit is a local folder, `refs` names commits."""

    id: str
    kind: str
    commits: dict[str, Path] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    gated: bool = False
    private: bool = False

    def files(self, commit: str) -> dict[str, Path]:
        """The files of a commit by their path in the repository."""
        root = self.commits[commit]
        return {p.relative_to(root).as_posix(): p for p in sorted(root.rglob("*")) if p.is_file()}


@cache
def _digest(path: Path, _stamp: int) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def sha256(path: Path) -> str:
    return _digest(path, path.stat().st_mtime_ns)


def json_answer(value: object) -> Answer:
    return Answer(200, {"Content-Type": "application/json"}, json.dumps(value).encode())


def no_repo(request: Request) -> Answer:
    status, text = (404, "Repository not found") if request.token else (401, "Invalid username or password.")
    return refusal(status, "RepoNotFound", text)


def refusal(status: int, code: str, text: str, commit: str = "") -> Answer:
    headers = {"X-Error-Code": code, "X-Error-Message": text, "X-Repo-Commit": commit, "Content-Type": "application/json"}
    return Answer(status, {k: v for k, v in headers.items() if v}, json.dumps({"error": text}).encode())


TROUBLE = {
    "error": refusal(500, "", "internal error of the loopback hub"),
    "busy": Answer(429, {"Retry-After": "1", "Content-Type": "application/json"}, b'{"error": "too many requests"}'),
}
