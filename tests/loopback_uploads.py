"""The writing half of the loopback Hub: what the real `huggingface_hub` client asks when it uploads.

`repos/create`, `whoami-v2`, `validate-yaml`, `preupload`, the Git LFS batch API with single and multipart transfers, `commit`
(to a branch, or as a pull request), `branch`, `refs` and `discussions`. Shapes as in huggingface_hub 1.33: `hf_api.py`
(`create_repo`, `create_commit`, `create_branch`, `list_repo_refs`, `get_repo_discussions`), `_commit_api.py`, `lfs.py`.

A commit is a new folder that links its parent's files. An object that arrived is kept, whether or not a commit followed, as
the Hub's storage does, and is not asked for again.
"""

import base64
import hashlib
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.loopback_answers import Answer, Repo, Request, json_answer, refusal, sha256

if TYPE_CHECKING:
    from tests.loopback_hub import LoopbackHub

BATCH = re.compile(r"/(?P<id>[^/]+/[^/]+)\.git/info/lfs/objects/batch")
OBJECT = re.compile(r"/lfs/(?P<oid>[0-9a-f]{64})(?:/(?P<part>\d+|complete))?")
LFS_SUFFIXES = (".safetensors", ".png")
PART_BYTES = 1_000_000  # a larger object comes in parts of this size
LFS_BYTES = 10_000_000  # a file that is larger is an LFS object whatever its name


@dataclass
class Fault:
    """Something that goes wrong the next `times` times a request's `METHOD path` matches `pattern`.

    Attributes:
        kind: `error` (500), `busy` (429 with Retry-After: 1), `drop` (the connection breaks in the middle of the request's
            body), `lost` (what was asked is done, and the answer is lost).
    """

    pattern: str
    kind: str
    times: int = 1
    happened: int = 0

    def meets(self, request: Request) -> bool:
        """Whether it happens now; counts down."""
        if not self.times or not re.search(self.pattern, f"{request.method} {request.path}"):
            return False
        self.times -= 1
        self.happened += 1
        return True


@dataclass
class Uploads:
    """The objects that arrived, and what was done with them.

    Attributes:
        storage: A folder for objects and commits.
        received: Object -> how many times its bytes arrived whole.
        names: A token's user; `user` where it is not here.
        readers: Tokens that may not write.
    """

    storage: Path
    received: dict[str, int] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    readers: set[str] = field(default_factory=set)
    parts: dict[tuple[str, int], bytes] = field(default_factory=dict)
    pulls: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def new_folder(self) -> Path:
        """An empty folder for a commit."""
        folder = self.storage / f"commit-{len(list(self.storage.glob('commit-*')))}"
        folder.mkdir()
        return folder

    def user(self, token: str | None) -> str:
        """Who a token belongs to."""
        return self.names.get(token or "", "user")

    def object_path(self, oid: str) -> Path:
        """Where an object lies."""
        return self.storage / "objects" / oid

    def store(self, oid: str, data: bytes) -> bool:
        """Keeps an object whose content is what its name says."""
        if hashlib.sha256(data).hexdigest() != oid:
            return False
        self.object_path(oid).parent.mkdir(exist_ok=True)
        self.object_path(oid).write_bytes(data)
        self.received[oid] = self.received.get(oid, 0) + 1
        return True


def git_blob(data: bytes) -> str:
    """Git's name of a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def upload_mode(path: str, size: int) -> str:
    """Whether the Hub stores a file as an LFS object."""
    return "lfs" if path.endswith(LFS_SUFFIXES) or size > LFS_BYTES else "regular"


def answer_upload(hub: "LoopbackHub", request: Request, path: str, body: bytes) -> Answer | None:
    """The answer to a request of an upload; None when it is another."""
    fixed: dict[str, Callable[[], Answer]] = {
        "/api/repos/create": lambda: _create(hub, request, json.loads(body)),
        "/api/validate-yaml": lambda: json_answer({"errors": [], "warnings": []}),
        "/api/whoami-v2": lambda: _whoami(hub, request),
    }
    if path in fixed:
        return fixed[path]()
    if match := BATCH.fullmatch(path):
        repo = hub.repos.get(("model", match["id"]))
        return refusal(404, "RepoNotFound", "Repository not found") if repo is None else _batch(hub, json.loads(body))
    if match := OBJECT.fullmatch(path):
        return _receive(hub, match["oid"], match["part"], body)
    return None


def _whoami(hub: "LoopbackHub", request: Request) -> Answer:
    if request.token is None:
        return refusal(401, "", "Invalid username or password.")
    role = "read" if request.token in hub.uploads.readers else "write"
    orgs = [{"name": "org"}]
    return json_answer(
        {"type": "user", "name": hub.uploads.user(request.token), "orgs": orgs, "auth": {"accessToken": {"role": role}}}
    )


def _create(hub: "LoopbackHub", request: Request, asked: dict[str, Any]) -> Answer:
    if request.token is None:
        return refusal(401, "", "Invalid username or password.")
    user = hub.uploads.user(request.token)
    if asked["organization"] not in (None, user, "org") or request.token in hub.uploads.readers:
        return refusal(403, "", "You don't have the rights to create a model under this namespace")
    repo_id = f"{asked['organization'] or user}/{asked['name']}"
    if ("model", repo_id) in hub.repos:
        return Answer(
            409, {}, json.dumps({"error": "You already created this model repo", "url": f"{hub.endpoint}/{repo_id}"}).encode()
        )
    repo = hub.repos[("model", repo_id)] = Repo(repo_id, "model", private=asked.get("visibility") == "private")
    first = hub.uploads.new_folder()
    (first / ".gitattributes").write_text("*.safetensors filter=lfs diff=lfs merge=lfs -text\n")
    _tip(repo, "main", first)
    return json_answer({"url": f"{hub.endpoint}/{repo_id}", "name": repo_id})


def _tip(repo: Repo, ref: str, folder: Path) -> str:
    commit = hashlib.sha1(f"{repo.id} {ref} {len(repo.commits)}".encode(), usedforsecurity=False).hexdigest()
    repo.commits[commit], repo.refs[ref] = folder, commit
    return commit


def _batch(hub: "LoopbackHub", asked: dict[str, Any]) -> Answer:
    objects = []
    for wanted in asked["objects"]:
        entry: dict[str, Any] = {"oid": wanted["oid"], "size": wanted["size"]}
        if not hub.uploads.object_path(wanted["oid"]).exists():
            href = f"{hub.endpoint}/lfs/{wanted['oid']}"
            upload: dict[str, Any] = {"href": href}
            if wanted["size"] > PART_BYTES:
                count = -(-wanted["size"] // PART_BYTES)
                urls = {str(part): f"{href}/{part}" for part in range(1, count + 1)}
                upload = {"href": f"{href}/complete", "header": {"chunk_size": str(PART_BYTES), **urls}}
            entry["actions"] = {"upload": upload}
        objects.append(entry)
    return json_answer({"transfer": "multipart", "objects": objects})


def _receive(hub: "LoopbackHub", oid: str, part: str | None, body: bytes) -> Answer:
    if part is not None and part != "complete":
        hub.uploads.parts[(oid, int(part))] = body
        return Answer(200, {"ETag": f'"{hashlib.md5(body, usedforsecurity=False).hexdigest()}"'})
    if part == "complete":
        body = b"".join(hub.uploads.parts.get((oid, p["partNumber"]), b"") for p in json.loads(body)["parts"])
    if not hub.uploads.store(oid, body):
        return refusal(422, "", "the object's content is not what its name says")
    return Answer(200)


def answer_repository(
    hub: "LoopbackHub", repo: Repo, request: Request, what: str, rest: str, body: bytes, query: dict[str, list[str]]
) -> Answer | None:
    """The answer to a request that writes to a repository or lists its refs; None when it is another."""
    found = hub.uploads.pulls.get(repo.id, [])
    reads: dict[str, Callable[[], Answer]] = {
        "refs": lambda: _refs(repo),
        "discussions": lambda: json_answer({"discussions": found, "count": len(found), "start": 0}),
    }
    writes: dict[str, Callable[[], Answer]] = {
        "branch": lambda: _branch(repo, rest, body),
        "preupload": lambda: _preupload(repo, rest, json.loads(body)),
        "commit": lambda: _commit(hub, repo, request, rest, body, create_pr=query.get("create_pr") == ["1"]),
    }
    if what in writes and (request.token is None or request.token in hub.uploads.readers):
        return refusal(403, "", "You don't have the rights to write to this repository")
    if what in ("preupload", "commit") and rest not in repo.refs:
        return refusal(404, "RevisionNotFound", f"Invalid rev id: {rest}")
    routes = reads | writes
    return routes[what]() if what in routes else None


def _refs(repo: Repo) -> Answer:
    pulls = [{"name": n, "ref": n, "targetCommit": c} for n, c in repo.refs.items() if n.startswith("refs/")]
    heads = [(n, c) for n, c in repo.refs.items() if not n.startswith("refs/")]
    branches = [{"name": n, "ref": f"refs/heads/{n}", "targetCommit": c} for n, c in heads]
    return json_answer({"branches": branches, "converts": [], "tags": [], "pullRequests": pulls})


def _branch(repo: Repo, name: str, body: bytes) -> Answer:
    if name in repo.refs:
        return refusal(409, "", "Reference already exists")
    repo.refs[name] = repo.refs[json.loads(body or b"{}").get("startingPoint", "main")]
    return json_answer({})


def _preupload(repo: Repo, ref: str, asked: dict[str, Any]) -> Answer:
    there = repo.files(repo.refs[ref])
    files = []
    for file in asked["files"]:
        mode = upload_mode(file["path"], file["size"])
        old = there.get(file["path"])
        oid = None if old is None else sha256(old) if mode == "lfs" else git_blob(old.read_bytes())
        files.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
    return json_answer({"files": files})


def _commit(hub: "LoopbackHub", repo: Repo, request: Request, ref: str, body: bytes, *, create_pr: bool) -> Answer:
    lines = [json.loads(line) for line in body.splitlines()]
    header = lines[0]["value"]
    parent = repo.refs[ref]
    if header.get("parentCommit") not in (None, parent):
        return refusal(412, "", "A commit has happened since. Please refresh and try again.")
    folder = hub.uploads.new_folder()
    for name, path in repo.files(parent).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        os.link(path, folder / name)
    for line in lines[1:]:
        place = folder / line["value"]["path"]
        place.parent.mkdir(parents=True, exist_ok=True)
        place.unlink(missing_ok=True)
        if line["key"] == "file":
            place.write_bytes(base64.b64decode(line["value"]["content"]))
        elif line["key"] == "lfsFile":
            if not hub.uploads.object_path(line["value"]["oid"]).exists():
                return refusal(422, "", f"LFS object {line['value']['oid']} was never uploaded")
            os.link(hub.uploads.object_path(line["value"]["oid"]), place)
    number = len(hub.uploads.pulls.get(repo.id, [])) + 1
    commit = _tip(repo, f"refs/pr/{number}" if create_pr else ref, folder)
    if create_pr:
        hub.uploads.pulls.setdefault(repo.id, []).append(
            {
                "num": number,
                "title": header["summary"],
                "author": {"name": hub.uploads.user(request.token)},
                "createdAt": "2026-01-01T00:00:00.000Z",
                "status": "open",
                "isPullRequest": True,
                "repo": {"name": repo.id, "type": "model"},
            }
        )
    url = f"{hub.endpoint}/{repo.id}/commit/{commit}"
    pull = f"{hub.endpoint}/{repo.id}/discussions/{number}" if create_pr else None
    return json_answer({"success": True, "commitUrl": url, "commitOid": commit, "pullRequestUrl": pull})
