"""Whether a repository may be written over: not what someone else put there, unless that is asked for."""

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from assemble.card import CARD
from assemble.provenance import PROVENANCE
from assemble.publish.errors import RefusedError
from assemble.publish.patience import patiently
from assemble.publish.proof import Proven
from assemble.publish.remote import Difference, Remote, difference, read_remote
from assemble.publish.target import PushTarget

if TYPE_CHECKING:
    from huggingface_hub import HfApi

# What another evaluation or smoke test of the same weights changes.
OURS = re.compile(r"README\.md|provenance\.json|(evaluation|smoke)-[^/]*\.(png|svg)")


def check_replaceable(api: "HfApi", proven: Proven, target: PushTarget, remote: Remote, say: Callable[[str], None]) -> None:
    """Refuses to write over other content. A new card for the same weights is no other content, unless someone edited the old.

    Where nothing is lost nothing is refused: a pull request is a proposal, and what a new branch holds main holds as well.

    Raises:
        RefusedError: the branch holds something else.
    """
    change = difference(proven.files, remote)
    touched = (*change.other, *change.extra)
    if not touched:
        return
    same_weights = bool(proven.weights) and proven.weights.keys() <= remote.files.keys()
    only_card = same_weights and all(OURS.fullmatch(name) for name in touched)
    kept = _kept_elsewhere(api, target, remote, say)
    if target.replace or kept or (only_card and _card_is_ours(api, target, remote, say)):
        where = "the pull request" if target.pull_request else target.revision
        say(f"{target.repo_id} ({where}): replacing {', '.join(touched[:6])}{', …' if len(touched) > 6 else ''}")
        return
    what = f"a {CARD} that someone wrote" if only_card else f"something else: {Difference((), change.other, change.extra)}"
    raise RefusedError(
        f"{target.repo_id} ({target.revision}) holds {what}. Choose another repository or branch, or replace all of "
        "it: --replace"
    )


def _kept_elsewhere(api: "HfApi", target: PushTarget, remote: Remote, say: Callable[[str], None]) -> bool:
    """Whether what lies there stays reachable whatever is written: it is only proposed to replace it, or main has it too."""
    if target.pull_request:
        return True
    if target.revision == "main":
        return False
    main = read_remote(api, target, "main", say)
    return main is not None and main.commit == remote.commit


def _card_is_ours(api: "HfApi", target: PushTarget, remote: Remote, say: Callable[[str], None]) -> bool:
    """Whether the README.md there is the one that the provenance.json there records."""
    if CARD not in remote.files:
        return True
    if PROVENANCE not in remote.files:
        return False

    def fetched(name: str) -> bytes:
        return Path(patiently(lambda: api.hf_hub_download(target.repo_id, name, revision=remote.commit), say)).read_bytes()

    try:
        recorded = json.loads(fetched(PROVENANCE))["files"][CARD]
    except (ValueError, KeyError, TypeError):
        return False
    return bool(recorded == hashlib.sha256(fetched(CARD)).hexdigest())
