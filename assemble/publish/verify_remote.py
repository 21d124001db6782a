"""A repository on the Hub against its own provenance.json, without downloading the weights.

The Hub tells the SHA-256 of each LFS file, the shards among them. The other files are small, and are read.
"""

import hashlib
from pathlib import Path

from assemble.errors import InputError
from assemble.hub_errors import HubError, hub_errors
from assemble.provenance import PROVENANCE, FileFinding, read_provenance
from assemble.publish.remote import UNMINDED


def check_remote(reference: str, revision: str | None) -> tuple[list[FileFinding], int]:
    """Compares a repository's files with its provenance.

    Returns:
        What is not as recorded, and how many files were compared.

    Raises:
        InputError: it has no provenance.json.
        HubError: the Hub does not give it.
    """
    from huggingface_hub import HfApi, RepoFile

    with hub_errors(reference, revision):
        api = HfApi()
        commit = str(api.model_info(reference, revision=revision).sha)
        tree = api.list_repo_tree(reference, recursive=True, revision=commit)
        there = {f.path: f for f in tree if isinstance(f, RepoFile) and f.path not in UNMINDED}
        if PROVENANCE not in there:
            raise InputError(f"{reference} has no {PROVENANCE}, so there is nothing to compare its files with.")
        fetched = {
            name: Path(api.hf_hub_download(reference, name, revision=commit)) for name, f in there.items() if f.lfs is None
        }
    if PROVENANCE not in fetched:
        raise HubError(f"{reference}: {PROVENANCE} is stored as a large file. Download the repository, and verify it there.")
    record = read_provenance(fetched[PROVENANCE].parent)
    assert record is not None  # noqa: S101 - it was fetched a moment ago
    recorded = record["files"]
    found = {name: f.lfs.sha256 for name, f in there.items() if f.lfs is not None}
    found |= {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in fetched.items() if name != PROVENANCE}
    findings = [FileFinding("missing", n, "not there", f"SHA-256 {d}") for n, d in recorded.items() if n not in found]
    findings += [
        FileFinding("changed", n, f"SHA-256 {found[n]}", d) for n, d in recorded.items() if n in found and found[n] != d
    ]
    findings += [
        FileFinding("extra", n, "a file that is not recorded", f"no such file: {PROVENANCE} does not name it")
        for n in found
        if n not in recorded
    ]
    return findings, len(found)
