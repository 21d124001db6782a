"""provenance.json after a repair: it states no digest that is not true any more, and says what was mended."""

from collections.abc import Iterable
from typing import Any

from assemble.checkpoint import read_json
from assemble.jsonfile import JSONFileError
from assemble.mend.draft import Draft
from assemble.mend.layout import OutputShard
from assemble.provenance import PROVENANCE


def updated_provenance(draft: Draft, shards: Iterable[OutputShard], written: Iterable[str]) -> dict[str, Any] | None:
    """The record of how the checkpoint was made, brought up to date; None where there is none to update.

    Digests of files that stay are kept, under a shard's new number; those of files that change are taken out.
    """
    try:
        record = read_json(draft.found.root, PROVENANCE)
    except JSONFileError:
        return None
    if record is None or not draft.mended or not isinstance(record.get("files"), dict):
        return None
    digests = record["files"]
    shard_names = {shard.name for shard in draft.found.shards}
    gone = {*written, *draft.side_files, *draft.removed, *shard_names}
    files = {name: digest for name, digest in digests.items() if name not in gone}
    files |= {s.name: digests[s.link] for s in shards if s.link in digests}
    notes = [{"repair": n.repair, "where": n.where, "found": n.found, "remedy": n.remedy} for n in draft.mended]
    earlier = record.get("mended")
    return {**record, "files": dict(sorted(files.items())), "mended": [*(earlier if isinstance(earlier, list) else []), *notes]}
