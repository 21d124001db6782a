"""A small Hugging Face Hub on 127.0.0.1, for the real `huggingface_hub` and `datasets` clients to talk to.

It serves local folders as the commits of model and dataset repositories, and answers as hf.co does as far as the
clients can tell: repository info, `tree`, `paths-info`, `auth-check`, and `resolve` with HEAD, GET and Range, with the
headers X-Repo-Commit, ETag and X-Error-Code. As on hf.co, the metadata of a gated repository is public and its files
are not; an unknown repository is answered 401 without a token and 404 with one; a wrong token is refused everywhere.

Uploads are in `tests.loopback_uploads`. A private repository is not there for who has no token.

What goes wrong is set by plain attributes: `Repo.gated`, `LoopbackHub.tokens`, `.drops`, `.resets`, `.errors` and `.faults`.
Every request is kept in `LoopbackHub.requests`.
"""

import hashlib
import os
import re
import socket
import struct
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from tests.loopback_answers import TROUBLE, Answer, Repo, Request, json_answer, no_repo, refusal, sha256
from tests.loopback_uploads import LFS_SUFFIXES, Fault, Uploads, answer_repository, answer_upload, git_blob

API = re.compile(r"/api/(?P<kind>model|dataset)s/(?P<id>[^/]+/[^/]+)(?:/(?P<what>[a-z-]+)(?:/(?P<rest>.*))?)?")
RESOLVE = re.compile(r"/(?P<kind>datasets/)?(?P<id>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")


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
        faults: What else goes wrong with which requests.
        requests: What was asked, in order.
        uploads: What arrived.
    """

    endpoint: str = ""
    repos: dict[tuple[str, str], Repo] = field(default_factory=dict)
    tokens: set[str] = field(default_factory=set)
    drops: dict[str, int] = field(default_factory=dict)
    resets: bool = False
    errors: int = 0
    faults: list[Fault] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    uploads: Uploads = field(default_factory=lambda: Uploads(Path()))

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
        offline = {"HF_HUB_OFFLINE": "0", "HF_DATASETS_OFFLINE": "0"}
        return {"HF_ENDPOINT": self.endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"} | offline

    def connect(self, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
        """The same for this process, whose `huggingface_hub` and `datasets` have read their variables already."""
        import datasets
        from huggingface_hub import constants

        template = self.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", self.endpoint)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # else hf_xet uploads by a protocol of its own
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
        """Routes a request."""
        if request.token is not None and request.token not in self.tokens:
            return refusal(401, "", "Invalid credentials in Authorization header")
        url = urlsplit(request.path)
        resolve, api = RESOLVE.fullmatch(unquote(url.path)), API.fullmatch(url.path)
        if self.errors and (resolve or api):
            self.errors -= 1
            return refusal(500, "", "internal error of the loopback hub")
        if uploaded := answer_upload(self, request, unquote(url.path), body):
            return uploaded
        if resolve:
            return self._resolve(request, resolve)
        return self._api(request, api, parse_qs(url.query), body) if api else refusal(404, "", "no such route")

    def _api(self, request: Request, match: re.Match[str], query: dict[str, list[str]], body: bytes) -> Answer:
        repo = self.repos.get((match["kind"], match["id"]))
        what, rest = match["what"], unquote(match["rest"] or "")
        if repo is None or (repo.private and request.token is None):
            return no_repo(request)
        if written := answer_repository(self, repo, request, what or "", rest, body, query):
            return written
        if what == "auth-check":
            return self._gate(repo, request) or Answer(200)
        return self._read(repo, what, rest, query, body)

    def _read(self, repo: Repo, what: str | None, rest: str, query: dict[str, list[str]], body: bytes) -> Answer:
        # a branch's slashes come quoted, so in a tree's path the first slash ends the revision
        revision, _, folder = rest.partition("/") if what == "tree" else (rest, "", "")
        commit = _commit(repo, revision or "main")
        if commit is None:
            return refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        files = repo.files(commit)
        if what == "tree":
            return json_answer(_tree(files, folder, recursive=query.get("recursive") == ["true"]))
        if what == "paths-info":
            wanted = parse_qs(body.decode())["paths"]
            return json_answer([entry for entry in _tree(files, "", recursive=True) if entry["path"] in wanted])
        siblings = [{"rfilename": name} for name in files]
        return json_answer({"id": repo.id, "sha": commit, "siblings": siblings, "private": repo.private, "tags": []})

    def _resolve(self, request: Request, match: re.Match[str]) -> Answer:
        repo = self.repos.get(("dataset" if match["kind"] else "model", match["id"]))
        if repo is None or (repo.private and request.token is None):
            return no_repo(request)
        if refused := self._gate(repo, request):
            return refused
        commit = _commit(repo, match["revision"])
        if commit is None:
            return refusal(404, "RevisionNotFound", f"Invalid rev id: {match['revision']}")
        path = repo.files(commit).get(match["file"])
        if path is None:
            return refusal(404, "EntryNotFound", "Entry not found", commit)
        return self._file(request, path, commit)

    def _file(self, request: Request, path: Path, commit: str) -> Answer:
        content, headers = path.read_bytes(), {"X-Repo-Commit": commit, "ETag": f'"{sha256(path)}"', "Accept-Ranges": "bytes"}
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
        return refusal(401, "GatedRepo", f"Access to {repo.kind} {repo.id} is restricted. You must be authenticated.")


@contextmanager
def loopback_hub() -> Iterator[LoopbackHub]:
    """Serves a new, empty hub while the block runs."""
    with tempfile.TemporaryDirectory(prefix="loopback-hub-") as storage:
        yield from _serve(LoopbackHub(uploads=Uploads(Path(storage))))


def _serve(hub: LoopbackHub) -> Iterator[LoopbackHub]:
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
            token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
            request = Request(self.command, self.path, self.headers.get("Range"), token)
            with lock:
                kind = next((fault.kind for fault in hub.faults if fault.meets(request)), None)
            length = int(self.headers.get("Content-Length") or 0)
            body = self.rfile.read(length // 2 if kind == "drop" else length)
            request.received = len(body)
            if kind == "drop":
                with lock:
                    hub.requests.append(request)
                self._break_off(reset=True)
                return
            with lock:
                answer = TROUBLE[kind] if kind in TROUBLE else hub.answer(request, body)
                whole = answer.body if self.command != "HEAD" else b""
                part = whole[: answer.cut]
                request.status, request.sent = answer.status, len(part)
                hub.requests.append(request)
            if kind == "lost":
                self._break_off(reset=True)
                return
            self.send_response(answer.status)
            for name, value in {**answer.headers, "Content-Length": str(len(answer.body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(part)
            if answer.cut is not None:
                self._break_off()

        do_HEAD = do_POST = do_PUT = do_GET  # noqa: N815 - http.server's names

        def _break_off(self, *, reset: bool = False) -> None:
            self.wfile.flush()
            self.close_connection = True
            if (
                hub.resets or reset
            ):  # closing with a linger time of zero sends RST; the server's own way would send FIN before it
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
            size, digest = path.stat().st_size, sha256(path)
            lfs = {"lfs": {"oid": digest, "size": size, "pointerSize": 134}} if name.endswith(LFS_SUFFIXES) else {}
            oid = digest[:40] if lfs else git_blob(path.read_bytes())
            entries.append({"type": "file", "path": prefix + name, "size": size, "oid": oid, **lfs})
    return entries
