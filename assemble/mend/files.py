"""Repairs of what lies where: shards that cannot be read, files that mislead, doubled and foreign tensors, side files.

The index, `total_size`, the shards' numbers and their metadata need no repair of their own here: they follow from where
the draft's tensors are laid (`assemble.mend.layout`).
"""

from pathlib import Path

from assemble.architecture import LM_HEAD, MTP_PREFIX, VISION_PREFIX
from assemble.formats import COMPANIONS, FP8, W4A16_NVFP4
from assemble.mend.draft import Draft, same_bytes, weight_names
from assemble.mend.found import TWIN
from assemble.mend.origins import Stored
from assemble.sidefiles import MISLEADING, TOKENIZER, side_files
from assemble.vision import vision_tensors

KV_SCALES = (".k_scale", ".v_scale")
MISNAMED = (
    ("model.language_model.mtp.", MTP_PREFIX),
    ("language_model.mtp.", MTP_PREFIX),
    ("model.mtp.", MTP_PREFIX),
    ("model.language_model.lm_head.", f"{LM_HEAD}."),
    ("language_model.lm_head.", f"{LM_HEAD}."),
    ("model.lm_head.", f"{LM_HEAD}."),
    ("model.model.", "model."),
)


def misleading_files(draft: Draft) -> None:
    """Files that make vLLM take the checkpoint for another kind are left out."""
    root = draft.found.root
    paths = [p for pattern in MISLEADING for p in root.glob(pattern)]
    paths += [p for p in root.glob("*hf_quant_config.json") if p.name != TWIN]
    for path in sorted(paths):
        held = [n for n, copies in draft.found.copies.items() if any(t.shard == path.name for t in copies)]
        if any(len(draft.found.copies[n]) == 1 for n in held):
            draft.mend(path.name, "vLLM would take the checkpoint for another kind", "numbered like the other shards")
            continue
        draft.removed.add(path.name)
        draft.mend(path.name, "present: vLLM would take the checkpoint for another kind", "left out")
        for name in held:
            other = next(t for t in draft.found.copies[name] if t.shard != path.name)
            draft.tensors[name] = Stored(draft.found.path_of(other), other)


def unreadable_shards(draft: Draft) -> None:
    """A shard that cannot be read is left out; what it held is missing, for the repairs after this one."""
    for name, why in draft.found.broken.items():
        if name.endswith(".safetensors") and name not in draft.removed:
            draft.removed.add(name)
            draft.mend(name, why, "left out; its tensors are taken from elsewhere, as far as they can be")


def doubled_tensors(draft: Draft) -> None:
    """One copy of a tensor stays: of equal ones the indexed one, of different ones the one that is known to be right."""
    for name, copies in draft.found.copies.items():
        kept = [t for t in copies if t.shard not in draft.removed]
        if len(kept) < 2 or name.startswith(MTP_PREFIX):  # of the head's, the head's repair keeps the right one
            continue
        stored = [Stored(draft.found.path_of(t), t) for t in kept]
        places = " and ".join(t.shard for t in kept)
        chosen = _right_copy(draft, name, stored)
        if chosen is not None:
            draft.tensors[name] = chosen
            draft.mend(name, f"stored in {places}", f"the copy in {chosen.tensor.shard} is kept")
        elif not _regained(draft, name):
            draft.held |= {(name, t.shard) for t in kept}
            draft.cannot(name, f"stored in {places}, with different contents", "which one is right: give --source")
        else:
            draft.mend(name, f"stored in {places}, with different contents", "made anew from the source")


def _right_copy(draft: Draft, name: str, stored: list[Stored]) -> Stored | None:
    listed = draft.listed(name.removesuffix(".weight")) if name.endswith(".weight") else None
    wanted = {W4A16_NVFP4: "U8", FP8: "F8_E4M3"}.get(listed or "")
    fitting = [s for s in stored if s.tensor.dtype == wanted] or stored
    if all(same_bytes(fitting[0], other) for other in fitting[1:]):
        indexed = draft.found.weight_map.get(name)
        return next((s for s in fitting if s.tensor.shard == indexed), fitting[0])
    source = draft.source
    if source is None or name not in source:
        return None
    truth = Stored(source.path_of(source[name]), source[name])
    return next((s for s in fitting if same_bytes(s, truth)), None)


def _regained(draft: Draft, name: str) -> bool:
    """Whether a later repair makes the tensor anew: a plain one is copied, a quantized module is computed."""
    module, _, leaf = name.rpartition(".")
    source = draft.source
    if source is None:
        return False
    if leaf in ("weight", *COMPANIONS) and leaf != "input_scale" and any(n in source for n in weight_names(module)):
        draft.suspect.add(module)
        return True
    return name in source


def misnamed_tensors(draft: Draft) -> None:
    """A tensor under a wrong prefix gets its name back, unless that name is taken."""
    known = _known(draft)
    starts = tuple(wrong for wrong, _ in MISNAMED)
    for name in [n for n in draft.tensors if n.startswith(starts)]:
        for wrong, right in MISNAMED:
            good = right + name.removeprefix(wrong)
            if name.startswith(wrong) and name not in known and good in known and good not in draft.tensors:
                draft.tensors[good] = draft.tensors.pop(name)
                draft.mend(name, "a name that the model does not have", f"renamed to {good}")
                draft.settle()
                break


def foreign_tensors(draft: Draft) -> None:
    """Tensors that the model has no parameter for are left out: vLLM refuses them, in the index or not."""
    vision = vision_tensors(draft.config) if draft.architecture.wrapped else {}
    known = _known(draft) | (vision or {}).keys()
    families = (MTP_PREFIX,) if vision is not None else (MTP_PREFIX, VISION_PREFIX)  # a tower that is not known stays
    for name in [n for n in draft.tensors if n not in known and not n.startswith(families) and not n.endswith(KV_SCALES)]:
        del draft.tensors[name]
        inside = name in draft.found.weight_map or draft.found.index is None
        draft.mend(name, "the model has no such tensor" + ("" if inside else "; not in the index either"), "left out")


def _known(draft: Draft) -> set[str]:
    """Names that the decoder and the head can have, the scales of their modules included."""
    architecture = draft.architecture
    names = {*architecture.body_tensors, *architecture.mtp_tensors}
    for module in architecture.linear_modules:
        names |= {f"{module}.{leaf}" for leaf in ("weight", *COMPANIONS)}
        names.update(weight_names(module))
    return names


def missing_side_files(draft: Draft) -> None:
    """Tokenizer, chat template, processor and generation files that the source has and the checkpoint lost."""
    present = set(side_files(draft.found.root))
    source: Path | None = draft.source.root if draft.source else None
    for name in side_files(source) if source else ():
        if name not in present and source:
            draft.side_files[name] = source / name
            draft.mend(name, "absent", "copied from the source")
    for name in (TOKENIZER, "tokenizer_config.json"):
        if name not in present and name not in draft.side_files:
            draft.cannot(name, "absent", "the source's file: give --source")
