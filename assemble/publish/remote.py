"""What lies on the Hub: the files of a revision with their hashes, and how they differ from what was sent.

The Hub names an LFS file by its SHA-256, and any other by git's hash of its content (huggingface_hub 1.33 `RepoFile`), so
that a whole repository is compared without a download.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from assemble.publish.patience import patiently
from assemble.publish.proof import Parcel
from assemble.publish.target import PushTarget

if TYPE_CHECKING:
    from huggingface_hub import HfApi, RepoFile

UNMINDED = (".gitattributes",)  # the Hub's own


@dataclass(frozen=True)
class Remote:
    """A revision of a repository: its commit, its files, and who sees it. `commit` is None where there is no such branch."""

    commit: str | None
    files: Mapping[str, "RepoFile"]
    private: bool


def read_remote(api: "HfApi", target: PushTarget, revision: str, say: Callable[[str], None]) -> Remote | None:
    """The state of a branch or commit; None when there is no such repository.

    Raises:
        huggingface_hub's errors, but for a repository or revision that is not there.
    """
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    def ask() -> Remote | None:
        from huggingface_hub import RepoFile

        try:
            private = bool(api.model_info(target.repo_id).private)
        except RepositoryNotFoundError:
            return None
        try:
            commit = str(api.model_info(target.repo_id, revision=revision).sha)
        except RevisionNotFoundError:
            return Remote(None, {}, private)
        tree = api.list_repo_tree(target.repo_id, recursive=True, revision=commit)
        return Remote(commit, {f.path: f for f in tree if isinstance(f, RepoFile) and f.path not in UNMINDED}, private)

    return patiently(ask, say)


@dataclass(frozen=True)
class Difference:
    """How a repository differs from what is sent: files to send, and files that are there and not sent."""

    absent: tuple[str, ...]
    other: tuple[str, ...]
    extra: tuple[str, ...]

    @property
    def none(self) -> bool:
        """Whether it is the same, file for file."""
        return not (self.absent or self.other or self.extra)

    def __str__(self) -> str:
        kinds = (("not there", self.absent), ("other content", self.other), ("not ours", self.extra))
        return "; ".join(f"{word}: {', '.join(names[:4])}{', …' if len(names) > 4 else ''}" for word, names in kinds if names)


def difference(files: Mapping[str, Parcel], remote: Remote) -> Difference:
    """Compares what is sent with what is there, by hash."""
    there = remote.files
    return Difference(
        tuple(sorted(files.keys() - there.keys())),
        tuple(sorted(name for name in files.keys() & there.keys() if not same(files[name], there[name]))),
        tuple(sorted(there.keys() - files.keys())),
    )


def same(parcel: Parcel, there: "RepoFile") -> bool:
    """Whether a file on the Hub has this content."""
    from huggingface_hub.utils.sha import git_hash

    if there.size != parcel.size:
        return False
    if there.lfs is not None:
        return bool(there.lfs.sha256 == parcel.sha256)
    data = parcel.content.read_bytes() if isinstance(parcel.content, Path) else parcel.content
    return bool(git_hash(data) == there.blob_id) and hashlib.sha256(data).hexdigest() == parcel.sha256
