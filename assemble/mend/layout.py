"""Lays the draft's tensors into shards, so that a shard is rewritten only if one of its tensors changes or leaves.

A shard whose tensors all stay is linked, under a new number if the count changed. One that loses or changes a tensor is
rewritten. What is new goes into a shard that is rewritten anyway and held the tensor before, else into shards of its own;
a new head always into one of its own, so that the next splice costs the head's size and no more.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from assemble.architecture import MTP_PREFIX
from assemble.checkpoint import INDEX, Shard
from assemble.formats import TensorSpec
from assemble.mend.draft import Draft
from assemble.mend.origins import Origin, Stored
from assemble.plan import SHARD_NAME, file_order, natural, pack, shard_name

MAX_SHARD_BYTES = 5_000_000_000
SINGLE = "model.safetensors"


@dataclass(frozen=True)
class OutputShard:
    """A shard to be.

    Attributes:
        name: Its file name.
        link: The shard that it is, unchanged; None when it is written.
        tensors: Its tensors, in file order.
        origins: Where the bytes of each come from.
    """

    name: str
    link: str | None
    tensors: tuple[TensorSpec, ...]
    origins: Mapping[str, Origin]

    @property
    def nbytes(self) -> int:
        """Bytes of tensor data."""
        return sum(t.nbytes for t in self.tensors)


def lay_out(draft: Draft) -> tuple[OutputShard, ...]:
    """The shards of the draft; notes in it what is wrong with their numbers and metadata."""
    kept = {s.name: _kept(draft, s) for s in draft.found.shards if s.name not in draft.removed}
    rewritten = {s.name: s for s in draft.found.shards if s.name in kept and _rewritten(draft, s, kept[s.name])}
    homeless = {n: o for n, o in draft.tensors.items() if not (isinstance(o, Stored) and _in_place(draft, n, o, kept))}
    contents: dict[str, dict[str, Origin]] = {
        name: {n: draft.tensors[n] for n in names} if name in rewritten else {} for name, names in kept.items()
    }
    for shard in rewritten.values():
        contents[shard.name] |= {
            t.name: _held(draft, shard, t.name) for t in shard.tensors if (t.name, shard.name) in draft.held
        }
    fresh: dict[str, Origin] = {}
    for name, origin in homeless.items():
        home = _home(draft, name, origin)
        (contents[home] if home in rewritten and not name.startswith(MTP_PREFIX) else fresh)[name] = origin
    shards = [
        OutputShard(name, None, _ordered(contents[name]), contents[name]) if name in rewritten else _linked(draft, name)
        for name in kept
    ]
    written = [s for s in shards if s.link or s.tensors] + [OutputShard("", None, _ordered(p), p) for p in _packed(fresh)]
    return _numbered(draft, written)


def _kept(draft: Draft, shard: Shard) -> list[str]:
    """Names of the shard's tensors that stay where they are."""
    path = draft.found.root / shard.name
    held = draft.held
    return [t.name for t in shard.tensors if draft.tensors.get(t.name) == Stored(path, t) and (t.name, shard.name) not in held]


def _rewritten(draft: Draft, shard: Shard, kept: list[str]) -> bool:
    held = sum((t.name, shard.name) in draft.held for t in shard.tensors)
    unsaid = draft.renew_metadata and shard.metadata.get("format") != "pt"
    if len(kept) + held == len(shard.tensors) and kept and unsaid:
        draft.mend(f"{shard.name}: __metadata__", f"format {shard.metadata.get('format')!r}", "'pt': the shard is written anew")
        return True
    return len(kept) + held != len(shard.tensors)


def _in_place(draft: Draft, name: str, origin: Stored, kept: Mapping[str, list[str]]) -> bool:
    shard = origin.tensor.shard
    here = shard in kept and origin.path == draft.found.path_of(origin.tensor) and origin.tensor.name == name
    return here and origin.tensor in draft.found.copies.get(name, ())


def _held(draft: Draft, shard: Shard, name: str) -> Stored:
    return Stored(draft.found.root / shard.name, next(t for t in shard.tensors if t.name == name))


def _home(draft: Draft, name: str, origin: Origin) -> str:
    """The shard that holds the tensor now, or should by the index; one shard for all the tensors of a computed module."""
    module = name.rpartition(".")[0]
    names = [name, f"{module}.weight"] if isinstance(origin, Stored) else [spec.name for spec in origin.specs]
    for candidate in names:
        if copies := draft.found.copies.get(candidate):
            return copies[0].shard
    return next((draft.found.weight_map[n] for n in names if n in draft.found.weight_map), "")


def _ordered(origins: Mapping[str, Origin]) -> tuple[TensorSpec, ...]:
    return tuple(sorted((_spec(n, o) for n, o in origins.items()), key=file_order))


def _spec(name: str, origin: Origin) -> TensorSpec:
    return origin.spec(name) if isinstance(origin, Stored) else next(s for s in origin.specs if s.name == name)


def _linked(draft: Draft, name: str) -> OutputShard:
    shard = next(s for s in draft.found.shards if s.name == name)
    return OutputShard(name, name, tuple(TensorSpec(t.name, t.dtype, t.shape) for t in shard.tensors), {})


def _packed(fresh: Mapping[str, Origin]) -> list[dict[str, Origin]]:
    """New tensors in shards of their own: the body's, a module's tensors never apart, and the head's."""
    groups: dict[tuple[bool, str], list[TensorSpec]] = {}
    for name, origin in fresh.items():
        head = name.startswith(MTP_PREFIX)
        groups.setdefault((head, name if head else name.rpartition(".")[0]), []).append(_spec(name, origin))
    keys = sorted(groups, key=lambda key: natural(key[1]))
    parts = [p for head in (False, True) for p in pack([groups[k] for k in keys if k[0] == head], MAX_SHARD_BYTES)]
    return [{t.name: fresh[t.name] for t in part} for part in parts]


def _numbered(draft: Draft, shards: list[OutputShard]) -> tuple[OutputShard, ...]:
    """Numbers the shards: the numbered ones first, in their order, then the others, then the new ones."""
    shards.sort(key=lambda s: (not s.name, not SHARD_NAME.fullmatch(s.name), natural(s.name)))
    single = len(shards) == 1 and draft.found.index is None and INDEX not in draft.found.broken
    names = [SINGLE] if single else [shard_name(i, len(shards)) for i in range(1, len(shards) + 1)]
    wrong = [s.name for s, name in zip(shards, names, strict=True) if s.name and s.name != name]
    if len(shards) == 1 and shards[0].name == SINGLE:
        return tuple(shards)
    if wrong and all(s.name for s in shards):
        draft.mend(wrong[0], f"not numbered 1 to {len(shards)} of {len(shards)}", "shards renamed")
    return tuple(OutputShard(name, s.link, s.tensors, s.origins) for s, name in zip(shards, names, strict=True))
