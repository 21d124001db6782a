"""Uploads a proven checkpoint to the Hub, and compares what lies there afterwards.

Each file is sent on its own by huggingface_hub's `preupload_lfs_files`; the Hub keeps an object once it arrived, so that the
same command after an interruption sends only what did not. Then one commit makes all of them the branch's content. When the
answer to the commit is lost, the branch says whether it was made.
"""

import contextlib
import hashlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from assemble.card.tables import gigabytes
from assemble.hub_errors import HubError, hub_errors
from assemble.publish.account import check_account
from assemble.publish.errors import RefusedError, RemoteMismatchError
from assemble.publish.overwriting import check_replaceable
from assemble.publish.patience import ATTEMPTS, patiently, reason, wait_for
from assemble.publish.proof import Proven
from assemble.publish.remote import Difference, Remote, difference, read_remote
from assemble.publish.target import PushTarget

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

Say = Callable[[str], None]


@dataclass(frozen=True)
class Published:
    """What lies on the Hub now.

    Attributes:
        repo_id: The repository.
        revision: The branch, or `refs/pr/N`.
        commit: The commit that was compared.
        url: Its page.
        private: Whether it is seen by its owners only.
        files: How many files it has of ours.
        sent: The files of the new commit; empty when everything was there before.
        left: Files of the folder that were not sent.
    """

    repo_id: str
    revision: str
    commit: str
    url: str
    private: bool
    files: int
    sent: tuple[str, ...]
    left: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self) | {"sent": list(self.sent), "left": list(self.left)}


def publish(proven: Proven, target: PushTarget, say: Say) -> Published:
    """Makes the repository hold what was proven.

    Args:
        proven: The checkpoint.
        target: Where to.
        say: Told what goes on, a line each.

    Raises:
        RefusedError: the repository holds something else, or is public and that was not asked for.
        RemoteMismatchError: what lies there afterwards is not what was sent.
        HubError: the Hub does not take it; the same command continues.
    """
    from huggingface_hub import HfApi

    with hub_errors(target.repo_id, target.revision, writing=True), _quiet_without_terminal():
        api = HfApi()  # made here: the module's own functions keep the endpoint they were imported with
        check_account(api, target, say)
        before = _prepared(api, target, proven, say)
        change = difference(proven.files, before)
        if change.none:
            say(f"{target.repo_id} holds exactly this already")
            return _published(api, proven, target, target.revision, before, ())
        revision, sent = target.revision, (*change.absent, *change.other)
        if target.pull_request:
            revision = _open_pull(api, proven, target, say) or ""
        if not revision or not target.pull_request:
            operations = _sent(api, proven, target, change, say)
            revision = _commit(api, proven, target, before, operations, say)
        after = read_remote(api, target, revision, say)
    if after is None or not (left := difference(proven.files, after)).none:
        raise RemoteMismatchError(
            f"what lies at {target.repo_id} ({revision}) is not what was sent: {left if after else 'it is gone'}. Do not use "
            "it. Remove the repository, or that file of it, on its page; then give the same command."
        )
    return _published(api, proven, target, revision, after, sent)


def _published(
    api: "HfApi", proven: Proven, target: PushTarget, revision: str, remote: Remote, sent: tuple[str, ...]
) -> Published:
    url = f"{api.endpoint}/{target.repo_id}"
    if revision.startswith("refs/pr/"):
        url += f"/discussions/{revision.removeprefix('refs/pr/')}"
    commit = str(remote.commit)
    return Published(target.repo_id, revision, commit, url, remote.private, len(proven.files), sent, proven.left)


def _prepared(api: "HfApi", target: PushTarget, proven: Proven, say: Say) -> Remote:
    """The branch as it is, made if need be; refused when it may not be written over."""
    remote = read_remote(api, target, target.revision, say)
    if remote is not None and not remote.private and not target.public:
        raise RefusedError(f"{target.repo_id} is public: everyone would see the checkpoint. Say so with --public.")
    if remote is not None and remote.private and target.public:
        say(f"{target.repo_id} is private and stays so: --public is for a new one. Its settings page makes it public")
    if remote is not None and remote.commit is not None:
        check_replaceable(api, proven, target, remote, say)
        return remote
    if remote is None:
        say(f"making {target.repo_id} ({'public' if target.public else 'private'})")
        patiently(lambda: api.create_repo(target.repo_id, private=not target.public, exist_ok=True), say)
    if target.revision != "main":
        patiently(lambda: api.create_branch(target.repo_id, branch=target.revision, exist_ok=True), say)
    made = read_remote(api, target, target.revision, say)
    if made is None or made.commit is None:
        raise RefusedError(f"{target.repo_id} was made, and is not there. Try again in a minute.")
    check_replaceable(api, proven, target, made, say)
    return made


def _sent(
    api: "HfApi", proven: Proven, target: PushTarget, change: Difference, say: Say
) -> "list[CommitOperationAdd | CommitOperationDelete]":
    """Sends each file's content; the small ones travel in the commit."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    operations: list[CommitOperationAdd | CommitOperationDelete] = [CommitOperationDelete(name) for name in change.extra]
    names = sorted((*change.absent, *change.other), key=lambda name: proven.files[name].size)
    total, done, started = sum(proven.files[n].size for n in names), 0, time.monotonic()
    for name in names:
        parcel = proven.files[name]
        addition = CommitOperationAdd(name, parcel.content)
        _send(api, target, addition)
        # The digest is not given beforehand: hf_xet would then take our word for it (huggingface_hub 1.33 `_upload_xet_files`).
        if addition.upload_info.is_hashed and addition.upload_info.sha256.hex() != parcel.sha256:
            raise RefusedError(
                f"{name} changed while it was sent; nothing was committed. Check it: python -m assemble verify "
                f"{proven.root} --provenance"
            )
        operations.append(addition)
        done += parcel.size
        if parcel.size > 1_000_000:
            left = (time.monotonic() - started) * (total - done) / done
            say(f"  {name} is there ({gigabytes(parcel.size)}): {done / total:.0%} of all, about {left:.0f} s left")
    return operations


def _send(api: "HfApi", target: PushTarget, addition: "CommitOperationAdd") -> None:
    """Sends one file's content, unless the Hub has it or it travels in the commit.

    Raises:
        HubError: it did not arrive.
    """
    try:
        api.preupload_lfs_files(
            target.repo_id,
            [addition],
            revision=target.revision,
            create_pr=target.pull_request or None,
            free_memory=False,
            gitignore_content="",
        )
    except (RuntimeError, ValueError) as error:  # what the client, and hf_xet, make of errors during a transfer
        why = str(error.__cause__ or error).strip().splitlines() or [type(error).__name__]
        raise HubError(
            f"{target.repo_id}: {addition.path_in_repo} did not arrive: {why[0].rstrip('. ')}. Give the same command "
            "again: what arrived is not sent a second time."
        ) from error


@contextlib.contextmanager
def _quiet_without_terminal() -> Iterator[None]:
    """The client's progress bars are for terminals."""
    from huggingface_hub import utils

    quiet = not sys.stderr.isatty() and not utils.are_progress_bars_disabled()  # type: ignore[attr-defined]
    if quiet:
        utils.disable_progress_bars()  # type: ignore[attr-defined]
    try:
        yield
    finally:
        if quiet:
            utils.enable_progress_bars()  # type: ignore[attr-defined]


def _commit(
    api: "HfApi",
    proven: Proven,
    target: PushTarget,
    before: Remote,
    operations: "list[CommitOperationAdd | CommitOperationDelete]",
    say: Say,
) -> str:
    """Makes the commit, once, however often it has to be asked for.

    Returns:
        The branch, or the pull request's ref.

    Raises:
        RefusedError: someone else committed in the meantime.
    """
    for attempt in range(1, ATTEMPTS + 1):
        try:
            made = api.create_commit(
                target.repo_id,
                operations,
                commit_message=_title(proven, target),
                revision=target.revision,
                create_pr=target.pull_request,
                parent_commit=before.commit,
            )
        except Exception as error:
            seconds = wait_for(error, attempt)
            conflict = getattr(getattr(error, "response", None), "status_code", None) == 412
            if seconds is None and not conflict:
                raise
            if landed := _landed(api, proven, target, before, say):
                say("the commit was made, though its answer was lost")
                return landed
            if conflict or attempt == ATTEMPTS:
                raise
            say(f"the Hub: {reason(error)}; committing again in {seconds:.0f} s")
            time.sleep(seconds or 0)
        else:
            return f"refs/pr/{made.pr_num}" if target.pull_request else target.revision
    raise AssertionError("unreachable")


def _landed(api: "HfApi", proven: Proven, target: PushTarget, before: Remote, say: Say) -> str | None:
    """Where the commit is, when it was made after all.

    Raises:
        RefusedError: the branch is another than before, and not ours.
    """
    if target.pull_request:
        return _open_pull(api, proven, target, say)
    now = read_remote(api, target, target.revision, say)
    if now is None or now.commit == before.commit:
        return None
    change = difference(proven.files, now)
    if not (change.absent or change.extra):  # ours; whether each file's content is too is compared at the end
        return target.revision
    raise RefusedError(
        f"someone else committed to {target.repo_id} ({target.revision}) while the files were sent. Look at it, then give the "
        "same command: what arrived is not sent again."
    )


def _open_pull(api: "HfApi", proven: Proven, target: PushTarget, say: Say) -> str | None:
    """The pull request that an earlier attempt opened for exactly this content."""
    title = _title(proven, target)
    pulls = patiently(lambda: list(api.get_repo_discussions(target.repo_id, discussion_type="pull_request")), say)
    for pull in pulls:
        if pull.title == title and pull.status in ("open", "draft"):
            ref = f"refs/pr/{pull.num}"
            there = read_remote(api, target, ref, say)
            if there is not None and difference(proven.files, there).none:
                return ref
    return None


def _title(proven: Proven, target: PushTarget) -> str:
    """Names the content, so that a second attempt finds the first one's."""
    listed = "\n".join(f"{name} {parcel.sha256}" for name, parcel in sorted(proven.files.items()))
    digest = hashlib.sha256(listed.encode()).hexdigest()[:12]
    return f"Upload {target.repo_id.partition('/')[2]} (checked, content {digest})"
