"""A small Hugging Face Hub on 127.0.0.1, for the real `huggingface_hub` and `datasets` clients to talk to.

It serves local folders as the commits of model and dataset repositories, and answers as hf.co does as far as the
clients can tell: repository info, `tree`, `paths-info`, `auth-check`, and `resolve` with HEAD, GET and Range, with the
headers X-Repo-Commit, ETag and X-Error-Code. As on hf.co, the metadata of a gated repository is public and its files
are not; an unknown repository is answered 401 without a token and 404 with one; a wrong token is refused everywhere.

What goes wrong is set by plain attributes: `Repo.gated`, `LoopbackHub.tokens`, `.drops`, `.resets` and `.errors`.
Every request is kept in `LoopbackHub.requests`.
"""

import hashlib
import json
import os
import re
import socket
import struct
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

API = re.compile(r"/api/(?P<kind>model|dataset)s/(?P<id>[^/]+/[^/]+)(?:/(?P<what>[a-z-]+)(?:/(?P<rest>.*))?)?")
RESOLVE = re.compile(r"/(?P<kind>datasets/)?(?P<id>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")


@dataclass
class Request:
    """What a client asked, and how many bytes of body it was sent."""

    method: str
    path: str
    range: str | None
    token: str | None
    status: int = 0
    sent: int = 0


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

    def files(self, commit: str) -> dict[str, Path]:
        """The files of a commit by their path in the repository."""
        root = self.commits[commit]
        return {p.relative_to(root).as_posix(): p for p in sorted(root.rglob("*")) if p.is_file()}


@dataclass
class LoopbackHub:
    """The hub's content, its misbehaviour and its log.

    Attributes:
        endpoint: Its address, for HF_ENDPOINT.
        repos: Repositories by (`model` or `dataset`, id).
        tokens: Tokens that are good, and that open the gated repositories.
        drops: File name -> how many more times its transfer breaks off in the middle.
        resets: Break off with a TCP reset in place of an orderly close.
        errors: How many of the next requests for a repository are answered with a 500.
        requests: What was asked, in order.
    """

    endpoint: str = ""
    repos: dict[tuple[str, str], Repo] = field(default_factory=dict)
    tokens: set[str] = field(default_factory=set)
    drops: dict[str, int] = field(default_factory=dict)
    resets: bool = False
    errors: int = 0
    requests: list[Request] = field(default_factory=list)

    def add(self, id: str, folder: Path, *, kind: str = "model", branch: str = "main") -> str:  # noqa: A002 - the Hub's word
        """Makes the folder's present content the tip of a branch; returns the commit."""
        repo = self.repos.setdefault((kind, id), Repo(id, kind))
        commit = hashlib.sha1(f"{id} {branch} {len(repo.commits)}".encode(), usedforsecurity=False).hexdigest()
        repo.commits[commit], repo.refs[branch] = folder, commit
        return commit

    def sent(self, name: str) -> list[Request]:
        """The GET requests for a file."""
        return [r for r in self.requests if r.method == "GET" and "/resolve/" in r.path and r.path.endswith(f"/{name}")]

    def files_sent(self) -> set[str]:
        """The files of which at least a part was sent, as paths in their repository."""
        return {match["file"] for r in self.requests if r.method == "GET" and r.sent and (match := RESOLVE.fullmatch(r.path))}

    def environment(self, home: Path) -> dict[str, str]:
        """The variables that make a new process use this hub, with an empty cache in `home`."""
        return {"HF_ENDPOINT": self.endpoint, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "HF_DATASETS_OFFLINE": "0"}

    def connect(self, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
        """The same for this process, whose `huggingface_hub` and `datasets` have read their variables already."""
        import datasets
        from huggingface_hub import constants

        template = self.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", self.endpoint)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", self.endpoint)
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", home / "datasets")
        monkeypatch.delenv("HF_TOKEN", raising=False)
        self.go_offline(monkeypatch, offline=False)

    def go_offline(self, monkeypatch: pytest.MonkeyPatch, *, offline: bool = True) -> None:
        """What HF_HUB_OFFLINE=1 does at the start of a process."""
        import datasets
        from huggingface_hub import constants

        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", offline)
        monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", offline)

    def answer(self, request: Request, body: bytes) -> Answer:
        """Routes a request. An upload's routes would join here."""
        if request.token is not None and request.token not in self.tokens:
            return _refusal(401, "", "Invalid credentials in Authorization header")
        url = urlsplit(request.path)
        resolve, api = RESOLVE.fullmatch(unquote(url.path)), API.fullmatch(url.path)
        if self.errors and (resolve or api):
            self.errors -= 1
            return _refusal(500, "", "internal error of the loopback hub")
        if resolve:
            return self._resolve(request, resolve)
        return self._api(request, api, parse_qs(url.query), body) if api else _refusal(404, "", "no such route")

    def _api(self, request: Request, match: re.Match[str], query: dict[str, list[str]], body: bytes) -> Answer:
        repo = self.repos.get((match["kind"], match["id"]))
        what, rest = match["what"], unquote(match["rest"] or "")
        if repo is None:
            return _no_repo(request)
        if what == "auth-check":
            return self._gate(repo, request) or Answer(200)
        # a branch's slashes come quoted, so in a tree's path the first slash ends the revision
        revision, _, folder = rest.partition("/") if what == "tree" else (rest, "", "")
        commit = _commit(repo, revision or "main")
        if commit is None:
            return _refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        files = repo.files(commit)
        if what == "tree":
            return _json(_tree(files, folder, recursive=query.get("recursive") == ["true"]))
        if what == "paths-info":
            wanted = parse_qs(body.decode())["paths"]
            return _json([entry for entry in _tree(files, "", recursive=True) if entry["path"] in wanted])
        siblings = [{"rfilename": name} for name in files]
        return _json({"id": repo.id, "sha": commit, "siblings": siblings, "private": False, "tags": []})

    def _resolve(self, request: Request, match: re.Match[str]) -> Answer:
        repo = self.repos.get(("dataset" if match["kind"] else "model", match["id"]))
        if repo is None:
            return _no_repo(request)
        if refusal := self._gate(repo, request):
            return refusal
        commit = _commit(repo, match["revision"])
        if commit is None:
            return _refusal(404, "RevisionNotFound", f"Invalid rev id: {match['revision']}")
        path = repo.files(commit).get(match["file"])
        if path is None:
            return _refusal(404, "EntryNotFound", "Entry not found", commit)
        return self._file(request, path, commit)

    def _file(self, request: Request, path: Path, commit: str) -> Answer:
        content, headers = path.read_bytes(), {"X-Repo-Commit": commit, "ETag": f'"{_sha256(path)}"', "Accept-Ranges": "bytes"}
        status, begin, end = 200, 0, len(content)
        if request.range and (found := re.fullmatch(r"bytes=(\d+)-(\d*)", request.range)):
            begin, end = int(found[1]), min(int(found[2] or end), end - 1) + 1
            if begin >= len(content):
                return Answer(416, headers | {"Content-Range": f"bytes */{len(content)}"})
            status, headers["Content-Range"] = 206, f"bytes {begin}-{end - 1}/{len(content)}"
        cut = None
        if request.method == "GET" and self.drops.get(path.name, 0):
            self.drops[path.name] -= 1
            cut = (end - begin) // 2
        return Answer(status, headers, content[begin:end], cut)

    def _gate(self, repo: Repo, request: Request) -> Answer | None:
        if not repo.gated or request.token is not None:
            return None
        return _refusal(401, "GatedRepo", f"Access to {repo.kind} {repo.id} is restricted. You must be authenticated.")


@contextmanager
def loopback_hub() -> Iterator[LoopbackHub]:
    """Serves a new, empty hub while the block runs."""
    hub = LoopbackHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _handler(hub: LoopbackHub) -> type[BaseHTTPRequestHandler]:
    lock = threading.Lock()  # one answer at a time, so that counters and log agree

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
            request = Request(self.command, self.path, self.headers.get("Range"), token)
            with lock:
                answer = hub.answer(request, body)
                whole = answer.body if self.command != "HEAD" else b""
                part = whole[: answer.cut]
                request.status, request.sent = answer.status, len(part)
                hub.requests.append(request)
            self.send_response(answer.status)
            for name, value in {**answer.headers, "Content-Length": str(len(answer.body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(part)
            if answer.cut is not None:
                self._break_off()

        do_HEAD = do_POST = do_GET  # noqa: N815 - http.server's names

        def _break_off(self) -> None:
            self.wfile.flush()
            self.close_connection = True
            if hub.resets:  # closing with a linger time of zero sends RST; the server's own way would send FIN before it
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                os.close(self.connection.detach())

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - http.server's name
            """The log is `hub.requests`."""

    return Handler


def _commit(repo: Repo, revision: str) -> str | None:
    return revision if revision in repo.commits else repo.refs.get(revision)


def _tree(files: Mapping[str, Path], folder: str, *, recursive: bool) -> list[dict[str, object]]:
    prefix = f"{folder}/" if folder else ""
    below = {name.removeprefix(prefix): path for name, path in files.items() if name.startswith(prefix)}
    folders = {str(p) for name in below for p in list(Path(name).parents)[:-1] if recursive or "/" not in str(p)}
    entries: list[dict[str, object]] = [{"type": "directory", "path": prefix + f, "oid": "0" * 40} for f in sorted(folders)]
    for name, path in below.items():
        if recursive or "/" not in name:
            size, sha256 = path.stat().st_size, _sha256(path)
            lfs = {"lfs": {"oid": sha256, "size": size, "pointerSize": 134}} if name.endswith(".safetensors") else {}
            entries.append({"type": "file", "path": prefix + name, "size": size, "oid": sha256[:40], **lfs})
    return entries


@cache
def _digest(path: Path, _stamp: int) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _sha256(path: Path) -> str:
    return _digest(path, path.stat().st_mtime_ns)


def _json(value: object) -> Answer:
    return Answer(200, {"Content-Type": "application/json"}, json.dumps(value).encode())


def _no_repo(request: Request) -> Answer:
    status, text = (404, "Repository not found") if request.token else (401, "Invalid username or password.")
    return _refusal(status, "RepoNotFound", text)


def _refusal(status: int, code: str, text: str, commit: str = "") -> Answer:
    headers = {"X-Error-Code": code, "X-Error-Message": text, "X-Repo-Commit": commit, "Content-Type": "application/json"}
    return Answer(status, {k: v for k, v in headers.items() if v}, json.dumps({"error": text}).encode())
