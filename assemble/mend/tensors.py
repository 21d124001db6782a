"""Repairs of what is not quantized: it is the source's, byte for byte; and a check that nothing is missing."""

import re

from assemble.architecture import LM_HEAD, MTP_PREFIX, VISION_PREFIX, experts_container, read_architecture
from assemble.checkpoint import TensorInfo
from assemble.errors import InputError
from assemble.mend.draft import Draft, describe, same_bytes, weight_names
from assemble.mend.origins import Stored
from assemble.plan import SCALE_SUFFIXES
from assemble.vision import vision_tensors

LAYER = re.compile(r"model\.(?:language_model\.)?layers\.(\d+)\.")


class SourceMismatchError(InputError):
    """A source that is not the BF16 checkpoint this one was made from."""


def check_source(draft: Draft) -> None:
    """Refuses a source of another size, or one that is itself quantized, before anything is taken from it.

    Raises:
        SourceMismatchError: with what differs.
    """
    source = draft.source
    if source is None:
        return
    if source.config.get("quantization_config") or any(n.endswith(SCALE_SUFFIXES) for n in source):
        raise SourceMismatchError(
            f"{source.root} is quantized. Give the BF16 checkpoint that {draft.found.root} was made from."
        )
    shared = [
        (copies[0], source[name])
        for name, copies in draft.found.copies.items()
        if name in source and not name.startswith(MTP_PREFIX)
    ]
    wrong = [(mine, theirs) for mine, theirs in shared if _full_shape(mine) != theirs.shape]
    if len(wrong) > len(shared) // 2 or not shared:
        what = f"{wrong[0][0].name} is {describe(wrong[0][0])} here and {describe(wrong[0][1])} there, " if wrong else ""
        raise SourceMismatchError(
            f"{source.root} is another model than {draft.found.root} was made from: {what}{len(wrong)} of {len(shared)} "
            "common tensors differ in shape. Give its own BF16 source."
        )
    layers = 1 + max((int(m[1]) for m in map(LAYER.match, draft.found.copies) if m), default=-1)
    theirs_layers = read_architecture(source.config, source).num_layers
    if theirs_layers not in (layers, draft.text.get("num_hidden_layers")):
        raise SourceMismatchError(
            f"{source.root} is another model than {draft.found.root} was made from: {theirs_layers} layers there, "
            f"{layers} here. Give its own BF16 source."
        )


def _full_shape(tensor: TensorInfo) -> tuple[int, ...]:
    """The shape of the weight that a tensor is, or holds packed two elements a byte."""
    packed = tensor.dtype == "U8" and len(tensor.shape) == 2
    return (tensor.shape[0], 2 * tensor.shape[1]) if packed else tensor.shape


def unquantized_tensors(draft: Draft) -> None:
    """What is not quantized and differs from the source, in bytes, dtype or shape, or is missing, is copied from it."""
    source = draft.source
    if source is None:
        return
    for name, tensor in source.items():
        if name.startswith(MTP_PREFIX) or _quantized(draft, name):
            continue
        truth = Stored(source.path_of(tensor), tensor)
        mine = draft.tensors.get(name)
        if isinstance(mine, Stored) and same_bytes(mine, truth):
            continue
        if mine is None:
            found = "absent"
        elif (draft.dtype(name), draft.spec(name).shape) != (tensor.dtype, tensor.shape):
            found = f"{draft.dtype(name)} {list(draft.spec(name).shape)}, the source has {describe(tensor)}"
        else:
            found = "other bytes than the source has"
        draft.tensors[name] = truth
        draft.mend(name, found, "copied from the source")
    for name in [n for n in draft.tensors if n.startswith(VISION_PREFIX) and n not in source]:
        del draft.tensors[name]
        draft.mend(name, "the source has no such tensor", "left out")
    draft.settle()


def _quantized(draft: Draft, name: str) -> bool:
    """Whether a tensor of the source is, or should be, quantized here."""
    module = name.removesuffix(".weight")
    if module in draft.modules:
        absent = draft.dtype(name) is None
        return draft.scheme(module) is not None or (absent and draft.listed(module) is not None)
    container = experts_container(module)  # the source's experts may be fused, this checkpoint's are split
    return container != module and draft.listed(container) is not None


def complete(draft: Draft) -> None:
    """Every tensor of the decoder is there, with its shape, and every one of a vision tower that is there in part.

    What is still missing now cannot be made here.
    """
    modules, vision = draft.modules, vision_tensors(draft.config) if draft.architecture.wrapped else None
    tower = vision if vision and any(name in draft.tensors for name in vision) else {}
    for name, shape in (draft.architecture.body_tensors | tower).items():
        module = name.removesuffix(".weight")
        spec = draft.spec(name)
        if spec is None:
            if module in modules and any(n in draft.tensors for n in weight_names(module)):
                continue
            if not (name == f"{LM_HEAD}.weight" and draft.architecture.tied):
                draft.cannot(name, "absent", "the source: give --source")
        elif module not in modules and spec.shape != shape:
            draft.cannot(name, f"shape {list(spec.shape)}, expected {list(shape)}", "the source: give --source")
        elif module not in modules and spec.dtype not in ("BF16", "F32", "F16"):
            draft.cannot(name, f"{spec.dtype}, but vLLM builds it in BF16", "the source: give --source")
