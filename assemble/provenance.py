"""provenance.json: what a checkpoint was made from, with what and how, and the SHA-256 of every file of it.

    {"format": 2, "model": ..., "head": ..., "recipe": ..., "inputs": {file: digest}, "stages": {name: {fingerprint, ...}},
     "card": {the facts that README.md is rendered from}, "card_form": how they are rendered,
     "files": {file: sha256 of every file but provenance.json}}

It holds no path, host name or token. `assemble.mend` takes the digests of the files that it changed out of it, and notes
what it did under `mended`.
"""

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assemble.checkpoint import read_json, stays_inside
from assemble.errors import InputError
from assemble.writer import Progress, sha256_file

PROVENANCE = "provenance.json"
FORMAT = 2
NOT_OURS = (".cache", ".git", ".gitattributes")  # what `hf download`, git and the Hub put beside the files
THREADS = 4


class ProvenanceError(InputError):
    """No provenance.json, or one that cannot be used."""


@dataclass(frozen=True)
class FileFinding:
    """A file that is not as recorded: `kind` is `missing`, `changed`, `extra`, `unrecorded` or `link`."""

    kind: str
    name: str
    found: str
    expected: str

    @property
    def error(self) -> bool:
        """Whether the checkpoint is not what its provenance says; a mended file without a digest is only noted."""
        return self.kind != "unrecorded"

    def __str__(self) -> str:
        return f"{self.name}: {self.found}, expected {self.expected}"


@dataclass(frozen=True)
class FileCheck:
    """The files of a folder against its provenance.json.

    Attributes:
        findings: What is not as recorded.
        digests: SHA-256 of each file that is there and belongs, provenance.json excepted.
    """

    findings: tuple[FileFinding, ...]
    digests: Mapping[str, str]

    @property
    def errors(self) -> list[FileFinding]:
        """What makes the check fail."""
        return [finding for finding in self.findings if finding.error]


def read_provenance(root: Path) -> dict[str, Any] | None:
    """The record, or None where there is none.

    Raises:
        ProvenanceError: not an object with the digests of files.
        JSONFileError: not JSON.
    """
    record = read_json(root, PROVENANCE)
    if record is None:
        return None
    files = record.get("files")
    if not isinstance(files, dict) or not all(isinstance(value, str) for value in files.values()):
        raise ProvenanceError(
            f"{root / PROVENANCE} has no `files` with a SHA-256 for each. Make it anew: python -m assemble card {root}"
        )
    for name in files:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ProvenanceError(f"{root / PROVENANCE} names {name!r}, which lies outside the folder. Do not use it.")
    return record


def provenance_text(record: Mapping[str, Any]) -> str:
    """The record as it is stored."""
    return json.dumps(record, indent=2, ensure_ascii=False) + "\n"


def files_of(root: Path) -> list[str]:
    """Every file in the folder and below, as a path relative to it; not what download tools keep there."""
    found = []
    for path in sorted(root.rglob("*")):
        relative = path.relative_to(root)
        if relative.parts[0] not in NOT_OURS and (path.is_file() or path.is_symlink()):
            found.append(relative.as_posix())
    return found


def check_files(root: Path, record: Mapping[str, Any], progress: Progress = lambda _: None) -> FileCheck:
    """Hashes every file and compares it with the record.

    Args:
        root: The checkpoint.
        record: Its provenance.
        progress: Called with the bytes of each chunk that was read.
    """
    recorded: Mapping[str, str] = record["files"]
    there = [name for name in files_of(root) if name != PROVENANCE]
    linked = [name for name in there if not stays_inside(root / name) or not (root / name).is_file()]
    readable = [name for name in there if name not in linked]
    with ThreadPoolExecutor(THREADS) as pool:
        digests = dict(zip(readable, pool.map(lambda name: sha256_file(root / name, progress), readable), strict=True))
    findings = [FileFinding("link", n, "a link out of the folder, or to nothing", "the file itself") for n in linked]
    for name, digest in sorted(recorded.items()):
        if name not in there:
            findings.append(FileFinding("missing", name, "not there", f"SHA-256 {digest}"))
        elif name in digests and digests[name] != digest:
            findings.append(FileFinding("changed", name, f"SHA-256 {digests[name]}", digest))
    extra = "unrecorded" if record.get("mended") else "extra"
    expected = "a digest: it was mended since" if record.get("mended") else f"no such file: {PROVENANCE} does not name it"
    findings += [FileFinding(extra, n, "a file that is not recorded", expected) for n in digests if n not in recorded]
    return FileCheck(tuple(findings), digests)
