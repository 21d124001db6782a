"""Repairs of the MTP head: bytes from a checkpoint that has it, and a config that declares it."""

import dataclasses
import re
from collections.abc import Iterable

import msgspec

from assemble.architecture import EXPERT, MTP_PREFIX, Architecture
from assemble.checkpoint import Checkpoint
from assemble.config import MTP_IGNORE
from assemble.errors import InputError
from assemble.mend.draft import Draft, describe
from assemble.mend.origins import Stored
from assemble.splice import find_head
from assemble.writer import sha256_tensor


class UnsoundError(InputError):
    """A checkpoint with other faults than its head's: a splice would have to guess what belongs to it."""


START_BYTES = 4096
LAYER = re.compile(r"mtp\.layers\.(\d+)\.")


def only_the_head(draft: Draft) -> None:
    """Refuses a checkpoint whose other files do not hold together; what is wrong with the head's does not matter.

    Raises:
        UnsoundError: with the first such fault.
    """
    found, mapped = draft.found, draft.found.weight_map
    faults = [f"{name}: {why}" for name, why in found.broken.items()]
    if found.config is None:
        faults.append("config.json: absent")
    stored = {name: [t.shard for t in copies] for name, copies in found.copies.items() if not name.startswith(MTP_PREFIX)}
    faults += [f"{name}: stored {len(shards)} times" for name, shards in stored.items() if len(shards) > 1]
    if found.index is not None:
        faults += [f"{name}: not where the index says" for name, shards in stored.items() if mapped.get(name) not in shards]
        lost = [n for n in mapped if n not in found.copies and not n.startswith(MTP_PREFIX)]
        faults += [f"{name}: in the index, but not stored" for name in lost]
    if faults:
        more = f" ({len(faults) - 1} more such faults)" if len(faults) > 1 else ""
        raise UnsoundError(f"{found.root}: {faults[0]}{more}. `repair` mends that, and the head with it.")


def head_origin(draft: Draft) -> Checkpoint | None:
    """Where a head can be taken from: what was named for it, or the source if it has one."""
    if draft.head is None and draft.source is not None and any(n.startswith(MTP_PREFIX) for n in draft.source):
        return draft.source
    return draft.head


def layers_declared(draft: Draft) -> None:
    """`mtp_num_hidden_layers` is the number of decoder layers that the head has."""
    names = head_origin(draft) or draft.tensors
    layers = {int(match[1]) for match in map(LAYER.match, names) if match}
    value = draft.text.get("mtp_num_hidden_layers")
    if layers and (type(value) is not int or value != len(layers)):
        draft.text["mtp_num_hidden_layers"] = len(layers)
        draft.settle()
        draft.mend("config.json: mtp_num_hidden_layers", repr(value), str(len(layers)))


def layout_of(architecture: Architecture, names: Iterable[str]) -> Architecture:
    """The architecture with the experts of its head laid out as in `names`, fused or split."""
    split = any(n.startswith(MTP_PREFIX) and EXPERT.search(n) for n in names)
    return dataclasses.replace(architecture, split_head_experts=split)


def right_head(draft: Draft) -> None:
    """Every tensor of the head is that of its origin, byte for byte, and there is no other tensor under `mtp.`.

    Raises:
        HeadError: the origin's head is absent, incomplete, or of another model's size.
    """
    origin = head_origin(draft)
    if origin is None:
        _check(draft)
        return
    wanted = find_head(origin, layout_of(draft.architecture, origin), "--head-from")
    for name in [n for n in draft.tensors if n.startswith(MTP_PREFIX) and n not in wanted]:
        del draft.tensors[name]
        draft.mend(name, "not a tensor of the head", "left out")
    for name, tensor in wanted.items():
        _place(draft, name, Stored(origin.path_of(tensor), tensor), origin)
    draft.settle()


def _place(draft: Draft, name: str, truth: Stored, origin: Checkpoint) -> None:
    """Keeps the stored copy that has the right bytes, or takes the origin's."""
    copies = [Stored(draft.found.path_of(t), t) for t in draft.found.copies.get(name, ())]
    renamed = draft.tensors.get(name)
    if not copies and isinstance(renamed, Stored):
        copies = [renamed]
    alike = [c for c in copies if _alike(c, truth)]
    digest = sha256_tensor(truth.path, truth.tensor) if alike else ""
    right = next((c for c in alike if sha256_tensor(c.path, c.tensor) == digest), None)
    draft.tensors[name] = right or truth
    if right is None:
        different = f"{describe(copies[0].tensor)}, other bytes than {origin.root} has" if copies else "absent"
        draft.mend(name, different, f"copied from {origin.root}")
    elif len(copies) > 1:
        draft.mend(name, f"stored {len(copies)} times", f"the right copy, in {right.tensor.shard}, is kept")


def _alike(one: Stored, other: Stored) -> bool:
    """Whether it is worth hashing the two: same dtype and shape, same first bytes. A wrong head is thus not read twice."""
    if (one.tensor.dtype, one.tensor.shape) != (other.tensor.dtype, other.tensor.shape):
        return False
    starts = [msgspec.structs.replace(s.tensor, nbytes=min(s.tensor.nbytes, START_BYTES)) for s in (one, other)]
    return Stored(one.path, starts[0]).read() == Stored(other.path, starts[1]).read()


def _check(draft: Draft) -> None:
    """Without an origin a head can only be judged by its names, shapes and dtypes."""
    needed = "a checkpoint that has it: give --head-from (the base model)"
    stored = [n for n in draft.tensors if n.startswith(MTP_PREFIX)]
    if not stored:
        draft.cannot("mtp.*", "no MTP head: nothing can draft", needed)
        return
    expected = layout_of(draft.architecture, stored).mtp_tensors
    for name, shape in expected.items():
        spec = draft.spec(name)
        if spec is None or spec.shape != shape or spec.dtype != "BF16":
            found = f"{spec.dtype} {list(spec.shape)}" if spec else "absent"
            draft.cannot(name, f"{found}, expected BF16 {list(shape)}", needed)
    for name in stored:
        copies = draft.found.copies.get(name, ())
        if name not in expected:
            draft.cannot(name, "not a tensor of a BF16 head", needed)
        elif len(copies) > 1 and len({sha256_tensor(draft.found.path_of(t), t) for t in copies}) > 1:
            draft.held |= {(name, t.shard) for t in copies}
            draft.cannot(name, f"stored {len(copies)} times, with different contents", needed)
        elif len(copies) > 1:
            draft.mend(name, f"stored {len(copies)} times, alike", "one copy is kept")


def not_listed(draft: Draft) -> None:
    """No entry of `quantized_layers` names a part of the head: vLLM would read its BF16 bytes as packed ones."""
    for file, place in (("config.json", draft.quantization), ("hf_quant_config.json", draft.twin_quantization)):
        layers = place.get("quantized_layers")
        if not isinstance(layers, dict):
            continue
        for module in [m for m in layers if m.startswith(MTP_PREFIX)]:
            del layers[module]
            draft.mend(f"{file}: quantized_layers[{module}]", "listed, though the head is BF16", "unlisted")


def ignored(draft: Draft) -> None:
    """`ignore` covers the head; vLLM's mixed method does not need it, other readers do."""
    for file, place, key in (
        ("config.json", draft.quantization, "ignore"),
        ("hf_quant_config.json", draft.twin_quantization, "exclude_modules"),
    ):
        value = place.get(key)
        entries = value if isinstance(value, list) else []
        if place and not set(MTP_IGNORE) & set(map(str, entries)):
            place[key] = [*entries, *MTP_IGNORE]
            draft.mend(f"{file}: {key}", "no entry for the MTP head", ", ".join(MTP_IGNORE))
