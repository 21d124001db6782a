"""The repairs, in the order in which they are made: each builds on what the ones before it have settled."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assemble.checkpoint import INDEX, Checkpoint
from assemble.mend import configs, files, head, ignore, modules, tensors, values
from assemble.mend.draft import Draft, Note
from assemble.mend.found import CONFIG, TWIN, Found, read_found
from assemble.mend.layout import OutputShard, lay_out
from assemble.mend.record import updated_provenance
from assemble.provenance import PROVENANCE

Repair = tuple[str, Callable[[Draft], None]]

REPAIRS: tuple[Repair, ...] = (
    ("config", configs.readable),
    ("recipe", configs.this_recipe),
    ("source", tensors.check_source),
    ("config", configs.source_fields),
    ("misleading-file", files.misleading_files),
    ("unreadable-shard", files.unreadable_shards),
    ("tie", configs.untied),
    ("head-layers", head.layers_declared),
    ("misnamed-tensor", files.misnamed_tensors),
    ("foreign-tensor", files.foreign_tensors),
    ("doubled-tensor", files.doubled_tensors),
    ("head", head.right_head),
    ("values", values.weights_of_the_source),
    ("module", modules.whole_modules),
    ("tensor-scale", modules.shared_tensor_scale),
    ("listed-bf16", modules.listed_but_plain),
    ("unquantized", tensors.unquantized_tensors),
    ("module", modules.stray_scales),
    ("missing-tensor", tensors.complete),
    ("dtype", configs.bfloat16),
    ("tie", configs.untied),
    ("quantization", configs.quantization_declared),
    ("ignore", ignore.ignore_sound),
    ("twin", configs.twins_agree),
    ("side-file", files.missing_side_files),
)
SPLICE: tuple[Repair, ...] = (
    ("sound", head.only_the_head),
    ("head-layers", head.layers_declared),
    ("head", head.right_head),
    ("head-listed", head.not_listed),
    ("head-ignored", head.ignored),
)


@dataclass(frozen=True)
class MendPlan:
    """What is wrong with a checkpoint and what it is to become.

    Attributes:
        found: The checkpoint as it is.
        shards: The shards it will have.
        written: JSON files that change: name -> content.
        side_files: Files to bring in: name -> where from.
        removed: Files to leave out.
        mended: The faults that will be mended.
        unmended: The faults that will stay.
    """

    found: Found
    shards: tuple[OutputShard, ...]
    written: Mapping[str, Any]
    side_files: Mapping[str, Path]
    removed: frozenset[str]
    mended: tuple[Note, ...]
    unmended: tuple[Note, ...]

    @property
    def nothing_to_do(self) -> bool:
        """Whether the checkpoint stays as it is, byte for byte."""
        return not self.mended

    @property
    def bytes_to_write(self) -> int:
        """Tensor bytes of the shards that are written; the others are linked."""
        return sum(s.nbytes for s in self.shards if s.link is None)


def plan_mending(
    root: Path,
    repairs: tuple[Repair, ...] = REPAIRS,
    *,
    source: Checkpoint | None = None,
    head_from: Checkpoint | None = None,
    unlist: bool = False,
) -> MendPlan:
    """Diagnoses a checkpoint and plans its repair, from headers, configs and, for what is compared, bytes.

    Args:
        root: The checkpoint.
        repairs: Which repairs, in order.
        source: The BF16 checkpoint it was made from.
        head_from: Where the MTP head is to come from, when not from `source`.
        unlist: Unlist what is listed and stored BF16, instead of quantizing it.

    Raises:
        InputError: the checkpoint, the source or the head is not what it would have to be.
    """
    found = read_found(root)
    # A splice costs the head's size: it leaves a shard that needs a new header only to `repair`.
    draft = Draft.of(found, source=source, head=head_from, unlist=unlist, renew_metadata=repairs is not SPLICE)
    for name, repair in repairs:
        draft.repair = name
        repair(draft)
    draft.repair = "shard"
    shards = lay_out(draft)
    draft.repair = "index"
    written = _changed_json(draft, shards)
    return MendPlan(
        found, shards, written, draft.side_files, frozenset(draft.removed), tuple(draft.mended), tuple(draft.unmended)
    )


def _changed_json(draft: Draft, shards: tuple[OutputShard, ...]) -> dict[str, Any]:
    written: dict[str, Any] = {}
    if draft.config != draft.found.config:
        written[CONFIG] = draft.config
    if draft.twin and draft.twin != draft.found.twin:
        written[TWIN] = draft.twin
    index = _index(draft, shards)
    if index is not None and index != draft.found.index:
        written[INDEX] = index
        _note_index(draft, index, shards)
    record = updated_provenance(draft, shards, written)
    return written | ({PROVENANCE: record} if record else {})


def _index(draft: Draft, shards: tuple[OutputShard, ...]) -> dict[str, Any] | None:
    """The index of the shards; None where one shard needs none."""
    if len(shards) == 1 and draft.found.index is None and INDEX not in draft.found.broken:
        return None
    weight_map = dict(sorted((t.name, s.name) for s in shards for t in s.tensors))
    for name in draft.tensors.keys() & {n for n, _ in draft.held}:
        weight_map[name] = draft.found.weight_map.get(name, weight_map[name])
    old = draft.found.index or {}
    metadata = old.get("metadata")
    total = sum(s.nbytes for s in shards)
    return {
        **old,
        "metadata": {**(metadata if isinstance(metadata, dict) else {}), "total_size": total},
        "weight_map": weight_map,
    }


def _note_index(draft: Draft, index: dict[str, Any], shards: tuple[OutputShard, ...]) -> None:
    """Says what is wrong with the index as it is found, given what lies on the disk."""
    old = draft.found.index
    if old is None:
        draft.mend(
            INDEX, draft.found.broken.get(INDEX, f"absent, though there are {len(shards)} shards"), "made from the shards"
        )
        return
    mapped = draft.found.weight_map
    absent = [n for n, f in mapped.items() if f not in [t.shard for t in draft.found.copies.get(n, ())]]
    unlisted = [n for n in draft.found.copies if n not in mapped and n in index["weight_map"]]
    for names, what in ((absent, "named, but not where the index says"), (unlisted, "stored, but not in the index")):
        if names:
            draft.mend(f"{INDEX}: {names[0]}", f"{what} ({len(names)} tensors)", "made from the shards")
    total = sum(t.nbytes for copies in draft.found.copies.values() for t in copies)
    metadata = old.get("metadata")
    stated = metadata.get("total_size") if isinstance(metadata, dict) else None
    if stated != total:
        draft.mend(f"{INDEX}: total_size", repr(stated), str(index["metadata"]["total_size"]))
