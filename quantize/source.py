"""Turns what the user calls a model (a directory, or a Hub id) into a local checkpoint, or into its headers alone.

A Hub id becomes a snapshot in huggingface_hub's own cache, at one commit. Only the files that matter are asked for: the
shards that the index names, the configs, and the tokenizer's and processor's files, all at the top of the repository.
"""

import contextlib
import errno
import re
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assemble.checkpoint import INDEX, Checkpoint, CheckpointError, Shard, TensorInfo
from assemble.errors import InputError
from assemble.jsonfile import read_object
from assemble.sidefiles import SIDE_FILES

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
SMALL_FILES = ["config.json", INDEX, *SIDE_FILES]
SHARD_NAME = re.compile(r"[^/\\*?\[\]]+\.safetensors")
SINGLE_SHARD = "model.safetensors"  # the name of an only shard, which needs no index
THREADS = 8
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


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

    A transfer that breaks off is resumed by huggingface_hub where it can be; after a failure, the next call keeps the
    files that are complete. When the Hub cannot be asked, what its cache holds is used.

    Raises:
        SourceError: neither a directory nor a reachable repository; or a revision for a directory.
    """
    if not is_hub_id(reference):
        return _local(reference, revision)
    with _hub_errors(reference, revision):
        small = _small_files(reference, revision)
        root = _snapshot(reference, small.name, [*SMALL_FILES, *_shard_names(small)])
    return Source(reference, root, root.name)


def open_headers(reference: str, revision: str | None) -> Checkpoint:
    """A checkpoint's headers and small files. From the Hub without its weights: headers come by range request.

    Raises:
        SourceError: as `fetch`.
        CheckpointError: files that do not hold together.
    """
    if not is_hub_id(reference):
        return Checkpoint.open(_local(reference, revision).root)
    with _hub_errors(reference, revision):
        root = _small_files(reference, revision)
        names = _shard_names(root)
        if all((root / name).is_file() for name in names):
            return Checkpoint.open(root)
        shards = _remote_shards(reference, root.name, names)
    if (root / INDEX).is_file():
        _check_index(reference, read_object(root / INDEX)["weight_map"], shards)
    return Checkpoint(root, read_object(root / "config.json"), {t.name: t for s in shards for t in s.tensors}, shards)


def _local(reference: str, revision: str | None) -> Source:
    root = Path(reference)
    if not root.exists():
        raise SourceError(f"{reference} does not exist. Give a checkpoint's directory, or a Hub id such as Qwen/Qwen3.5-27B.")
    if revision is not None:
        raise SourceError(f"--revision is for a Hub id; {reference} is a local directory.")
    return Source(reference, root.resolve(), None)


def _small_files(reference: str, revision: str | None) -> Path:
    """The folder of the snapshot, which is named by its commit, with everything in it but the shards."""
    root = _snapshot(reference, revision, SMALL_FILES, tqdm_class=_no_bar())
    if not (root / "config.json").is_file():
        raise SourceError(f"{reference} has no config.json, so it is not a model's repository. Check the spelling.")
    return root


def _no_bar() -> type:
    """A progress bar that shows nothing, for what takes no time."""
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    class NoBar(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options | {"disable": True})  # type: ignore[no-untyped-call]

    return NoBar


def _snapshot(reference: str, revision: str | None, patterns: list[str], **options: Any) -> Path:
    """The folder of a snapshot that has the files asked for.

    huggingface_hub takes a branch's commit from its cache when the Hub cannot be asked. For a commit it lists the files
    again unless the listing is cached too, so a cache that another version or program filled needs the second call.
    """
    import httpx
    from huggingface_hub import errors, snapshot_download

    options |= {"revision": revision, "allow_patterns": patterns}
    try:
        return Path(snapshot_download(reference, **options))
    except (errors.OfflineModeIsEnabled, httpx.ConnectError, httpx.TimeoutException):
        return Path(snapshot_download(reference, local_files_only=True, **options))


def _shard_names(root: Path) -> list[str]:
    """The shards that the index names; the one shard of a checkpoint without an index.

    The names become patterns of what to download, so only the plain names that `assemble.checkpoint` reads are let through.
    """
    if not (root / INDEX).is_file():
        return [SINGLE_SHARD]
    weight_map = read_object(root / INDEX).get("weight_map")
    names = set(weight_map.values()) if isinstance(weight_map, dict) and _are_texts(weight_map.values()) else {""}
    if unfit := [name for name in sorted(names) if not SHARD_NAME.fullmatch(name)]:
        raise CheckpointError(
            f"{root / INDEX}: weight_map must map tensor names to names of safetensors files beside it, found {unfit[0]!r}. "
            "Choose another repository or --revision."
        )
    return sorted(names) or [SINGLE_SHARD]


def _are_texts(values: Iterable[Any]) -> bool:
    return all(isinstance(value, str) for value in values)


def _remote_shards(reference: str, commit: str, names: list[str]) -> tuple[Shard, ...]:
    """The shards as their headers on the Hub describe them."""
    from huggingface_hub import HfApi

    api = HfApi()  # made here: the module's own functions keep the endpoint they were imported with
    sizes = {f.path: getattr(f, "size", 0) for f in api.get_paths_info(reference, names, revision=commit)}
    if absent := [name for name in names if name not in sizes]:
        raise SourceError(
            f"{reference} at commit {commit} has no {absent[0]}. Only safetensors checkpoints can be read: one "
            f"{SINGLE_SHARD}, or shards that {INDEX} names."
        )
    with ThreadPoolExecutor(THREADS) as pool:
        files = pool.map(lambda name: api.parse_safetensors_file_metadata(reference, name, revision=commit), names)
        return tuple(_shard(name, sizes[name], file) for name, file in zip(names, files, strict=True))


def _shard(name: str, file_bytes: int, file: Any) -> Shard:
    """A shard as `assemble.checkpoint.read_shard` would give it; tensor data ends where the file ends."""
    base = file_bytes - max((t.data_offsets[1] for t in file.tensors.values()), default=0)
    tensors = [
        TensorInfo(n, t.dtype, tuple(t.shape), name, base + t.data_offsets[0], t.data_offsets[1] - t.data_offsets[0])
        for n, t in file.tensors.items()
    ]
    tensors.sort(key=lambda t: (t.start, t.nbytes))
    return Shard(name, file_bytes, tuple(tensors), file.metadata)


def _check_index(reference: str, weight_map: Mapping[str, str], shards: tuple[Shard, ...]) -> None:
    """Refuses before the download what would be refused after it: an index that the headers contradict."""
    stored = {(tensor.name, shard.name) for shard in shards for tensor in shard.tensors}
    for name, shard in sorted(stored ^ set(weight_map.items())):
        where = "is not there" if (name, shard) not in stored else "is there, though the index does not place it there"
        raise CheckpointError(
            f"{reference}: {name}: {INDEX} and the headers disagree: in {shard} it {where}. Tell the repository's owner, "
            "or choose another --revision."
        )


@contextlib.contextmanager
def _hub_errors(reference: str, revision: str | None) -> Iterator[None]:
    """Says what the Hub's errors mean for the user; never prints a token (huggingface_hub's texts hold none)."""
    import httpx
    from huggingface_hub import errors

    try:
        yield
    except InputError:
        raise
    except (errors.NotASafetensorsRepoError, errors.SafetensorsParsingError, errors.HFValidationError) as error:
        raise SourceError(f"{reference}: {_first_line(error)}. Check the spelling, or give a local directory.") from error
    except (httpx.HTTPError, OSError) as error:
        if isinstance(error, OSError) and error.errno in DISK_ERRORS:
            raise  # the command line knows what to say about a full disk
        raise SourceError(_meaning(error, reference, revision)) from error


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
