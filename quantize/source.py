"""Turns what the user calls a model (a directory, or a Hub id) into a local checkpoint, or into its headers alone."""

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from assemble.checkpoint import INDEX, Checkpoint, Shard, TensorInfo
from assemble.errors import InputError
from assemble.jsonfile import read_object
from assemble.sidefiles import SIDE_FILES

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
SMALL_FILES = ["config.json", INDEX, *SIDE_FILES]


class SourceError(InputError):
    """A model that is not there, or that the Hub does not give."""


@dataclass(frozen=True)
class Source:
    """A model that can be read locally.

    Attributes:
        reference: As the user gave it.
        root: Its directory.
        revision: The Hub commit; None for a local directory.
    """

    reference: str
    root: Path
    revision: str | None

    @property
    def public_name(self) -> str:
        """What may be published: the Hub id, or a directory's name without its path."""
        return self.reference if self.revision else self.root.name


def is_hub_id(reference: str) -> bool:
    """Whether a reference is a Hub id: not an existing path, and of the form `org/name`."""
    return not Path(reference).exists() and HUB_ID.fullmatch(reference) is not None


def fetch(reference: str, revision: str | None) -> Source:
    """A local directory as it is; a Hub id as a snapshot at a pinned commit, with the files that matter only.

    An interrupted download continues where it stopped (huggingface_hub's cache).

    Raises:
        SourceError: neither a directory nor a reachable repository; or a revision for a directory.
    """
    if not is_hub_id(reference):
        return _local(reference, revision)
    from huggingface_hub import snapshot_download

    with _hub_errors(reference, revision):
        commit = _commit(reference, revision)
        root = snapshot_download(reference, revision=commit, allow_patterns=[*SMALL_FILES, "*.safetensors"])
    return Source(reference, Path(root), commit)


def open_headers(reference: str, revision: str | None) -> Checkpoint:
    """A checkpoint's headers and small files. From the Hub without its weights: headers come by range request.

    Raises:
        SourceError: as `fetch`.
        CheckpointError: files that do not hold together.
    """
    if not is_hub_id(reference):
        return Checkpoint.open(_local(reference, revision).root)
    from huggingface_hub import get_safetensors_metadata, snapshot_download

    with _hub_errors(reference, revision):
        commit = _commit(reference, revision)
        root = Path(snapshot_download(reference, revision=commit, allow_patterns=SMALL_FILES))
        if not (root / "config.json").is_file():
            raise SourceError(f"{reference} has no config.json on the Hub, so it is not a model's repository.")
        shards = []
        for name, file in get_safetensors_metadata(reference, revision=commit).files_metadata.items():
            tensors = [
                TensorInfo(n, t.dtype, tuple(t.shape), name, t.data_offsets[0], t.data_offsets[1] - t.data_offsets[0])
                for n, t in file.tensors.items()
            ]
            shards.append(Shard(name, sum(t.nbytes for t in tensors), tuple(tensors), file.metadata))
    return Checkpoint(root, read_object(root / "config.json"), {t.name: t for s in shards for t in s.tensors}, tuple(shards))


def _local(reference: str, revision: str | None) -> Source:
    root = Path(reference)
    if not root.exists():
        raise SourceError(f"{reference} does not exist. Give a checkpoint's directory, or a Hub id such as Qwen/Qwen3.5-27B.")
    if revision is not None:
        raise SourceError(f"--revision is for a Hub id; {reference} is a local directory.")
    return Source(reference, root.resolve(), None)


def _commit(reference: str, revision: str | None) -> str:
    """The commit that a revision names now; offline, the one that the local cache has for it."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import OfflineModeIsEnabled

    try:
        sha = HfApi().model_info(reference, revision=revision, timeout=10).sha
    except OfflineModeIsEnabled:
        root = snapshot_download(reference, revision=revision, allow_patterns=["config.json"], local_files_only=True)
        return Path(root).name
    return str(sha)


@contextlib.contextmanager
def _hub_errors(reference: str, revision: str | None) -> Iterator[None]:
    """Says what the Hub's errors mean for the user; never prints a token (huggingface_hub's texts hold none)."""
    import httpx
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError as error:
        raise SourceError(
            f"{reference} is gated. Accept its terms on its page, then log in: hf auth login (or set HF_TOKEN)."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise SourceError(f"{reference} has no revision {revision!r} on the Hub.") from error
    except errors.RepositoryNotFoundError as error:
        raise SourceError(
            f"{reference} is neither a local directory nor a repository the Hub shows you. "
            "Check the spelling; for a private one, log in: hf auth login (or set HF_TOKEN)."
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise SourceError(
            f"{reference} is not in the local cache and the Hub cannot be reached (or offline mode is on: HF_HUB_OFFLINE). "
            "Connect, or give a local directory."
        ) from error
    except (errors.NotASafetensorsRepoError, errors.SafetensorsParsingError) as error:
        raise SourceError(f"{reference}: {error}") from error
    except (errors.HfHubHTTPError, httpx.HTTPError, OSError) as error:
        raise SourceError(
            f"the Hub did not answer for {reference}: {str(error).splitlines()[0] if str(error) else type(error).__name__}. "
            "Try again: a download continues where it stopped. Or give a local directory."
        ) from error
