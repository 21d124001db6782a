"""What the Hub's errors mean for the user, in one paragraph each. huggingface_hub's texts hold no token."""

import contextlib
from collections.abc import Iterator

from assemble.errors import DISK_FULL, InputError


class HubError(InputError):
    """A repository that is not there, or that the Hub does not give."""


@contextlib.contextmanager
def hub_errors(reference: str, revision: str | None, *, writing: bool = False) -> Iterator[None]:
    """Turns the errors of huggingface_hub and of the connection into `HubError`.

    Args:
        reference: The repository.
        revision: The revision that is asked for.
        writing: Whether it is uploaded to, and not read from.

    Raises:
        HubError: what went wrong, and what to do.
        OSError: a full disk, which the commands explain themselves.
    """
    import httpx
    from huggingface_hub import errors

    try:
        yield
    except InputError:
        raise
    except (errors.NotASafetensorsRepoError, errors.SafetensorsParsingError, errors.HFValidationError) as error:
        raise HubError(f"{reference}: {_first_line(error)}. Check the spelling, or give a local directory.") from error
    except (httpx.HTTPError, OSError) as error:
        if isinstance(error, OSError) and error.errno in DISK_FULL:
            raise
        raise HubError(
            (_refused_upload(error, reference) if writing else None) or _meaning(error, reference, revision)
        ) from error


def _refused_upload(error: Exception, reference: str) -> str | None:
    """What an error means that ended an upload; None where it means the same as in a download."""
    from huggingface_hub import errors

    if isinstance(error, errors.HfHubHTTPError):
        status = error.response.status_code
        if status == 403:
            said = error.server_message or "no reason given"
            return f"the Hub does not let you write to {reference} ({said.rstrip('. ')}). With another token: hf auth login"
        if status in (401, 404):
            return None
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename} cannot be read: {error.strerror}."
    return (
        f"the Hub did not take all of {reference}: {_first_line(error)}. Give the same command again: what arrived is not sent "
        "a second time."
    )


def _meaning(error: Exception, reference: str, revision: str | None) -> str:
    from huggingface_hub import constants, errors

    known: tuple[tuple[type[Exception], str], ...] = (
        (
            errors.GatedRepoError,
            f"{reference} is gated. Accept its terms on its page, then log in: hf auth login (or set HF_TOKEN).",
        ),
        (
            errors.RevisionNotFoundError,
            f"{reference} has no revision {revision!r} on the Hub. Give a branch, tag or commit that its page lists.",
        ),
        (
            errors.RepositoryNotFoundError,
            f"{reference} is neither a local directory nor a repository the Hub shows you. Check the spelling; for a private "
            "one, log in: hf auth login (or set HF_TOKEN).",
        ),
    )
    for kind, text in known:
        if isinstance(error, kind):
            return text
    if isinstance(error, errors.HfHubHTTPError) and error.response.status_code == 401:
        return f"the Hub refuses your token for {reference}. Log in again: hf auth login (or correct or unset HF_TOKEN)."
    if isinstance(error, OSError) and error.filename is not None:
        return f"{reference} cannot be stored in the cache: {error.filename}: {error.strerror}. Correct that, or set HF_HOME."
    if constants.HF_HUB_OFFLINE:
        return (
            f"{reference} is no local directory, and the local cache does not have all of it; the Hub is not asked, because "
            "offline mode is on (HF_HUB_OFFLINE). Unset it once to download, or give a local directory."
        )
    return (
        f"the Hub did not give {reference}: {_first_line(_cause(error))}. Check the connection and try again: complete files "
        "are kept. Or give a local directory."
    )


def _cause(error: Exception) -> BaseException:
    """What made huggingface_hub look into its cache, rather than that nothing was found there."""
    from huggingface_hub import errors

    return (isinstance(error, errors.LocalEntryNotFoundError) and (error.__cause__ or error.__context__)) or error


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(". ")
