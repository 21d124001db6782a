"""A checkpoint on the Hub, read without downloading its weights.

A repository's top folder is mirrored in a temporary directory. Every file is there, under its name and with its size, but
as a sparse file: a hole, into which only what is asked for is fetched, by range request. At first that is the small JSON
files, whole, and the header of each shard. So whatever reads headers, names or sizes in a local checkpoint works on the
mirror as it is. Only tensor data must not be read from its files (a hole reads as zeros): for that the mirror is a `Reader`.
"""

import bisect
import contextlib
import math
import os
import re
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

from assemble.checkpoint import HEADER_LIMIT, INDEX, JSON_LIMIT, CheckpointError, Shard, read_json, read_shard
from assemble.hub_errors import HubError, hub_errors
from assemble.jsonfile import JSONFileError
from assemble.reader import LocalReader, Span, extent, runs
from assemble.sidefiles import SIDE_FILES, TOKENIZER

if TYPE_CHECKING:
    import httpx

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
WHOLE = ("config.json", INDEX, "*hf_quant_config.json", *(n for n in SIDE_FILES if n.endswith(".json") and n != TOKENIZER))
HEADER_BYTES = 64 * 1024  # of a shard are asked for first; a 27B's header has about 60 kB, a mixture of experts' megabytes
TOKENIZER_ENDS = 64  # bytes at each end of tokenizer.json, which has 20 MB
GAP_BYTES = 256 * 1024  # spans that lie closer come in one request: another one takes as long as this many bytes
RUN_BYTES = 8 * 1024 * 1024
WHOLE_BYTES = 32 * 1024 * 1024  # of a file are received at most from a server that sends it whole
ATTEMPTS = 5  # for a transfer that breaks off; it goes on where it was
THREADS = 8


def is_hub_id(reference: str) -> bool:
    """Whether a reference is a Hub id: not an existing path, and of the form `org/name`."""
    return not Path(reference).exists() and HUB_ID.fullmatch(reference) is not None


class HubMirror:
    """The top folder of a repository at one commit, as a local directory with holes. It is a `Reader` of its shards.

    Attributes:
        reference: The Hub id.
        commit: The commit.
        root: The local directory.
        sizes: Name to size in bytes, for every file of the top folder.
        fetched_bytes: What the Hub sent of the files' contents so far.
        requests: In how many requests.
    """

    def __init__(self, reference: str, commit: str, root: Path, sizes: Mapping[str, int]) -> None:
        self.reference = reference
        self.commit = commit
        self.root = root
        self.sizes = sizes
        self.fetched_bytes = 0
        self.requests = 0
        self._here: dict[str, list[tuple[int, int]]] = defaultdict(list)
        self._lock = threading.Lock()
        for name, size in sizes.items():
            with (root / name).open("wb") as file:
                file.truncate(size)

    @property
    def total_bytes(self) -> int:
        """What a download of the whole folder would be."""
        return sum(self.sizes.values())

    def read(self, spans: Sequence[Span]) -> list[bytes]:
        """The bytes of each span, in the order given, fetched if they are not here yet.

        Raises:
            HubError: the Hub does not give them.
        """
        self.fetch(spans)
        return LocalReader(self.root).read(spans)

    def fetch(self, spans: Iterable[Span]) -> None:
        """Fills holes: neighbours in one request, several requests at a time.

        Raises:
            HubError: the Hub does not give them.
        """
        within = (Span(s.shard, s.start, min(s.end, self.sizes.get(s.shard, 0))) for s in spans)
        missing = (self._missing(span) for span in within)
        wanted = [extent(run) for run in runs((s for s in missing if s.start < s.end), GAP_BYTES, RUN_BYTES)]
        pool = ThreadPoolExecutor(THREADS)
        try:
            with hub_errors(self.reference, self.commit):
                for _ in pool.map(self._fetch, wanted):
                    pass
        finally:
            pool.shutdown(cancel_futures=True)
        for span in wanted:
            self._here[span.shard].append((span.start, span.end))
        for shard in {span.shard for span in wanted}:
            self._here[shard] = _disjoint(self._here[shard])

    def fetch_headers(self, names: Sequence[str]) -> None:
        """Fetches the headers of shards, in two goes: a header's first 8 bytes say how long it is."""
        self.fetch(Span(name, 0, HEADER_BYTES) for name in names)
        prefixes = LocalReader(self.root).read([Span(name, 0, 8) for name in names])
        lengths = {name: int.from_bytes(prefix, "little") for name, prefix in zip(names, prefixes, strict=True)}
        self.fetch(Span(n, 0, 8 + length) for n, length in lengths.items() if length <= min(HEADER_LIMIT, self.sizes[n] - 8))

    def _missing(self, span: Span) -> Span:
        """What of a span is not here yet: less its beginning, where that is here; empty when it is here whole."""
        here = self._here[span.shard]
        before = bisect.bisect_right(here, (span.start, math.inf))
        return Span(span.shard, max(span.start, here[before - 1][1]) if before else span.start, span.end)

    def _fetch(self, span: Span) -> None:
        """Fetches one span into its place, and goes on where a transfer breaks off."""
        from huggingface_hub import constants, hf_hub_url
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff  # type: ignore[attr-defined]

        url = hf_hub_url(self.reference, span.shard, revision=self.commit, endpoint=constants.ENDPOINT)
        place, broken = span.start, None
        with (self.root / span.shard).open("rb+", buffering=0) as file:
            for _ in range(ATTEMPTS):
                headers = build_hf_headers() | {"Accept-Encoding": "identity", "Range": f"bytes={place}-{span.end - 1}"}
                with http_stream_backoff("GET", url, headers=headers) as response:
                    hf_raise_for_status(response)
                    place, broken = self._receive(response, file.fileno(), span, place)
                if place >= span.end:
                    return
        raise broken or HubError(f"the Hub sent too little of {span.shard}. Try again.")

    def _receive(self, response: "httpx.Response", descriptor: int, span: Span, place: int) -> tuple[int, Exception | None]:
        """Writes what arrives of a span from `place` on.

        Returns:
            How far it got, and the error that ended it. The error must not leave http_stream_backoff's block, which would
            take it for one of its own and start anew.
        """
        import httpx

        partial = response.status_code == 206
        if not partial and self.sizes[span.shard] > WHOLE_BYTES:
            raise HubError(f"the Hub's server does not send parts of files ({span.shard}). Download the checkpoint instead.")
        position = place if partial else 0
        broken, received = None, 0
        try:
            for chunk in response.iter_raw():
                received += len(chunk)
                first, last = max(position, place), min(position + len(chunk), span.end)
                if first < last:
                    os.pwrite(descriptor, chunk[first - position : last - position], first)
                    place = last
                position += len(chunk)
                if place >= span.end and not partial:
                    break
        except httpx.TransportError as error:
            broken = error
        with self._lock:
            self.fetched_bytes += received
            self.requests += 1
        return place, broken


def _disjoint(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same bytes as sorted ranges that do not touch."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


@contextlib.contextmanager
def opened(reference: str, revision: str | None) -> Iterator[tuple[Path, HubMirror | None]]:
    """What the user calls a checkpoint, as a directory; for a Hub id, with the mirror that reads its values.

    Raises:
        HubError: neither a directory nor a reachable repository, or a revision for a directory.
    """
    if is_hub_id(reference):
        with open_mirror(reference, revision) as mirror:
            yield mirror.root, mirror
    elif not Path(reference).is_dir():
        raise HubError(f"{reference} is not a directory. Give the one that holds config.json and the shards, or a Hub id.")
    elif revision is not None:
        raise HubError(f"--revision is for a Hub id; {reference} is a local directory.")
    else:
        yield Path(reference), None


@contextlib.contextmanager
def open_mirror(reference: str, revision: str | None) -> Iterator[HubMirror]:
    """Mirrors a checkpoint's small files and headers, as long as the block runs.

    Raises:
        HubError: the Hub does not give it, or it has no config.json.
    """
    with _empty_mirror(reference, revision) as mirror:
        if "config.json" not in mirror.sizes:
            raise HubError(f"{reference} has no config.json, so it is not a model's repository. Check the spelling.")
        small = [n for n, size in mirror.sizes.items() if size <= JSON_LIMIT and any(fnmatch(n, p) for p in WHOLE)]
        size = mirror.sizes.get(TOKENIZER, 0)
        ends = [Span(TOKENIZER, 0, TOKENIZER_ENDS), Span(TOKENIZER, max(0, size - TOKENIZER_ENDS), size)]
        mirror.fetch([*(Span(name, 0, mirror.sizes[name]) for name in small), *ends])
        mirror.fetch_headers(_shards_to_read(mirror))
        yield mirror


def remote_shards(reference: str, commit: str, names: Sequence[str]) -> tuple[Shard, ...]:
    """Shards as their headers on the Hub describe them; nothing else is fetched.

    Raises:
        HubError: the Hub does not give them, or one is not there.
        CheckpointError: a header that does not fit its file.
    """
    with _empty_mirror(reference, commit) as mirror:
        if absent := [name for name in names if name not in mirror.sizes]:
            raise HubError(
                f"{reference} at commit {commit} has no {absent[0]}. Only safetensors checkpoints can be read: one "
                f"model.safetensors, or shards that {INDEX} names."
            )
        mirror.fetch_headers(names)
        try:
            return tuple(read_shard(mirror.root / name) for name in names)
        except (CheckpointError, JSONFileError) as error:
            raise CheckpointError(
                f"{reference}: {error}. Tell the repository's owner, or choose another --revision."
            ) from error


@contextlib.contextmanager
def _empty_mirror(reference: str, revision: str | None) -> Iterator[HubMirror]:
    from huggingface_hub import HfApi, RepoFile
    from huggingface_hub.errors import OfflineModeIsEnabled

    try:
        with hub_errors(reference, revision):
            api = HfApi()  # made here: the module's own functions keep the endpoint they were imported with
            commit = str(api.model_info(reference, revision=revision, timeout=10).sha)
            files = [f for f in api.list_repo_tree(reference, revision=commit) if isinstance(f, RepoFile)]
    except HubError as error:
        if isinstance(error.__cause__, OfflineModeIsEnabled):
            raise HubError(
                f"{reference} is no local directory, and the Hub is not asked, because offline mode is on (HF_HUB_OFFLINE). "
                "Unset it, or give the directory of a downloaded copy."
            ) from error
        raise
    with tempfile.TemporaryDirectory(prefix="nvfp4-mtp-hub-") as directory:
        yield HubMirror(reference, commit, Path(directory), {f.path: f.size for f in files if Path(f.path).name == f.path})


def _shards_to_read(mirror: HubMirror) -> list[str]:
    """The shards that `assemble.checkpoint.read_layout` will read: those that the index names, or all."""
    there = [name for name in mirror.sizes if name.endswith(".safetensors")]
    with contextlib.suppress(JSONFileError):
        index = read_json(mirror.root, INDEX)
        weight_map = index.get("weight_map") if index is not None else None
        if isinstance(weight_map, dict):
            named = {name for name in weight_map.values() if isinstance(name, str)}
            return [name for name in there if name in named]
    return there
