"""Whether the Hub will take a checkpoint: asked before any work, so that a missing token is not found out hours later."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from assemble.errors import InputError
from assemble.hub_errors import hub_errors
from assemble.publish.patience import patiently
from assemble.publish.target import PushTarget

if TYPE_CHECKING:
    from huggingface_hub import HfApi


class AccountError(InputError):
    """No token, or one that may not write there."""


def check_push(target: PushTarget, say: Callable[[str], None] = lambda _: None) -> str:
    """Asks the Hub who the token belongs to, and whether it may write.

    Returns:
        The user's name.

    Raises:
        AccountError: no token, one that may only read, or another's namespace.
        HubError: the Hub cannot be asked.
    """
    from huggingface_hub import HfApi

    with hub_errors(target.repo_id, target.revision, writing=True):
        return check_account(HfApi(), target, say)


def check_account(api: "HfApi", target: PushTarget, say: Callable[[str], None]) -> str:
    """The same, inside an upload."""
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        raise AccountError("offline mode is on (HF_HUB_OFFLINE), so that nothing can be uploaded. Unset it.")
    if get_token() is None:
        raise AccountError(
            f"uploading to {target.repo_id} needs a token that may write. Log in: hf auth login (or set HF_TOKEN)."
        )
    me: dict[str, Any] = patiently(api.whoami, say)
    role = ((me.get("auth") or {}).get("accessToken") or {}).get("role")
    if role == "read":
        raise AccountError(
            f"your token may only read, and uploading to {target.repo_id} writes. Log in with one that may write: hf auth login"
        )
    owner = target.repo_id.partition("/")[0]
    known = [me["name"], *(org["name"] for org in me.get("orgs") or [])]
    if owner not in known and not target.pull_request:  # a pull request may go to anyone
        raise AccountError(
            f"you are {me['name']}, and {owner!r} is none of your namespaces ({', '.join(known)}). Correct the name."
        )
    return str(me["name"])
