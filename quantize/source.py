"""Turns what the user calls a model (a directory, or a Hub id) into a local checkpoint, or into its headers alone.

A Hub id becomes a snapshot in huggingface_hub's own cache, at one commit. Only the files that matter are asked for: the
shards that the index names, the configs, and the tokenizer's and processor's files, all at the top of the repository.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assemble.checkpoint import INDEX, Checkpoint, CheckpointError, Shard
from assemble.hub import is_hub_id, remote_shards
from assemble.hub_errors import HubError, hub_errors
from assemble.jsonfile import read_object
from assemble.sidefiles import SIDE_FILES

SMALL_FILES = ["config.json", INDEX, *SIDE_FILES]
BASE_CARD = "README.md"  # of which license and language are taken over; no part of the model
SHARD_NAME = re.compile(r"[^/\\*?\[\]]+\.safetensors")
SINGLE_SHARD = "model.safetensors"  # the name of an only shard, which needs no index


SourceError = HubError  # a model that is not there, or that the Hub does not give


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


def fetch(reference: str, revision: str | None) -> Source:
    """A local directory as it is; a Hub id as a snapshot at a pinned commit, with the files that matter only.

    A transfer that breaks off is resumed by huggingface_hub where it can be; after a failure, the next call keeps the
    files that are complete. When the Hub cannot be asked, what its cache holds is used.

    Raises:
        SourceError: neither a directory nor a reachable repository; or a revision for a directory.
    """
    if not is_hub_id(reference):
        return _local(reference, revision)
    with hub_errors(reference, revision):
        small = _small_files(reference, revision)
        root = _snapshot(reference, small.name, [*SMALL_FILES, BASE_CARD, *_shard_names(small)])
    return Source(reference, root, root.name)


def open_headers(reference: str, revision: str | None) -> Checkpoint:
    """A checkpoint's headers and small files. From the Hub without its weights: headers come by range request.

    Raises:
        SourceError: as `fetch`.
        CheckpointError: files that do not hold together.
    """
    if not is_hub_id(reference):
        return Checkpoint.open(_local(reference, revision).root)
    with hub_errors(reference, revision):
        root = _small_files(reference, revision)
        names = _shard_names(root)
        if all((root / name).is_file() for name in names):
            return Checkpoint.open(root)
        shards = remote_shards(reference, root.name, names)
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


def _check_index(reference: str, weight_map: Mapping[str, str], shards: tuple[Shard, ...]) -> None:
    """Refuses before the download what would be refused after it: an index that the headers contradict."""
    stored = {(tensor.name, shard.name) for shard in shards for tensor in shard.tensors}
    for name, shard in sorted(stored ^ set(weight_map.items())):
        where = "is not there" if (name, shard) not in stored else "is there, though the index does not place it there"
        raise CheckpointError(
            f"{reference}: {name}: {INDEX} and the headers disagree: in {shard} it {where}. Tell the repository's owner, "
            "or choose another --revision."
        )
