"""Tensors that are not quantized have to be the source's, byte for byte. Which are not, and what they seem to be instead."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from assemble.architecture import MTP_PREFIX
from quantize.evaluate.matrix import Matrix
from quantize.evaluate.modules import cosine_of
from quantize.evaluate.weights import Layer, Weights

ABSENT = "is in the source and not in the checkpoint"
EXPERTS = ".mlp.experts."
SAME = 0.9  # a cosine beyond which two weights are taken for the same: quantization leaves 0.99, different weights give about 0
GROUP_BYTES = 256_000_000  # bytes of tensors that are compared together


@dataclass(frozen=True)
class Change:
    """A tensor that should be the source's and is not."""

    name: str
    text: str


def changed_in_layer(prefix: str, written: Layer, source: Layer) -> list[Change]:
    """Compares what is not quantized in a decoder layer; both on one device.

    Args:
        prefix: What the names begin with in the checkpoint.
        written: As read back.
        source: What it was made of.
    """
    pairs = {name: (tensor, source.others.get(name)) for name, tensor in written.others.items()}
    for name, matrix in written.matrices.items():
        if matrix.scheme is None:
            origin = source.matrices.get(name)
            suffix = "" if matrix.stacked else ".weight"
            pairs[name + suffix] = (matrix.weight, None if origin is None else origin.weight)
    others = {name: other for name, (_, other) in pairs.items() if other is not None}
    found = [Change(prefix + n, text) for n, (t, other) in pairs.items() if (text := _difference(t, other, n, others))]
    missing = [n for n in source.others if n not in written.others]
    missing += [f"{n}.weight" for n in source.matrices if n not in written.matrices]
    return found + [Change(prefix + name, ABSENT) for name in missing]


def differing_scales(prefix: str, layer: Layer) -> list[Change]:
    """NVFP4 modules that a server does not give their own tensor scale, because their fused group has another.

    An FP8 module in that place is encoded again to the group's scale, which is usual (ModelOpt gives q, k and v their own) and
    costs little; the walk's numbers have it in them.
    """
    changes = []
    for name, used in layer.served().items():
        own = layer.matrices[name]
        if not own.packed or own.tensor_scale is used.tensor_scale:
            continue
        container, _, leaf = name.rpartition(".")
        pairs = zip(own.tensor_scale.reshape(-1).tolist(), used.tensor_scale.reshape(-1).tolist(), strict=True)
        for e, (mine, theirs) in enumerate(pairs):
            if mine != theirs:
                where = f"{container}.{e}.{leaf}" if own.stacked else name
                text = (
                    f"has the tensor scale {mine:.4g}, and vLLM takes its fused group's, {theirs:.4g}: "
                    f"its values come out {theirs / mine:.3g} times what they are"
                )
                changes.append(Change(prefix + where, text))
    return changes


def changed_elsewhere(written: Weights, source: Weights, head: Weights, progress: Callable[[int], None]) -> list[Change]:
    """Compares what lies outside the decoder's layers: embedding, norm, vision tower, MTP head, an unquantized lm_head.

    Args:
        written: The checkpoint.
        source: What it was made of.
        head: What its MTP head was taken from; the source, if from nowhere else.
        progress: Called with the bytes of tensors compared.
    """
    changes = []
    for mtp, origin in ((False, source), (True, head)):
        renamed = {_renamed(name, origin, written): name for name in origin.checkpoint if _outside(name, origin, mtp=mtp)}
        there = [name for name in renamed if name in written.checkpoint]
        absent = [name for name in renamed if name not in written.checkpoint and not _stored_otherwise(name, written)]
        changes += [Change(name, ABSENT) for name in absent]
        for names in _groups(there, written):
            mine, theirs = written.read(names), origin.read([renamed[n] for n in names])
            others = {name: theirs[renamed[name]] for name in names}
            quantized = set() if mtp else {name for name in names if _packed(mine[name])}  # the modules' own numbers tell
            found = ((n, _difference(mine[n], others[n], n, others)) for n in names if n not in quantized)
            changes += [Change(name, text) for name, text in found if text]
            progress(sum(tensor.nbytes for tensor in mine.values()))
    return changes + _changed_head_experts(written, head)


def _changed_head_experts(written: Weights, head: Weights) -> list[Change]:
    """Compares a head's experts where one checkpoint stores them fused and the other one by one."""
    if written.architecture.split_head_experts == head.architecture.split_head_experts:
        return []
    mine, theirs = ({n: t for n, t in w.mtp_tensors().items() if EXPERTS in n} for w in (written, head))
    found = ((name, _difference(mine[name], theirs[name], name, theirs)) for name in mine if name in theirs)
    return [Change(MTP_PREFIX + name, text) for name, text in found if text]


def origin_of(name: str, matrix: Matrix, expert: int | None, source: Layer) -> str | None:
    """The source's matrix in the layer whose values a written one holds, when they are not its own's; None: no such.

    Args:
        name: The matrix's name in the layer; a stack's for an expert.
        matrix: What was written: a single matrix.
        expert: Which of the stack it is.
        source: The source's layer.
    """
    for other, stack in source.matrices.items():
        if not stack.stacked:
            if other != name and stack.shape == matrix.shape and cosine_of(matrix, stack) > SAME:
                return other
            continue
        if stack.shape[1:] != matrix.shape:
            continue
        for e in range(stack.shape[0]):
            candidate = Matrix(None, stack.weight[e])
            if (other, e) != (name, expert) and cosine_of(matrix, candidate) > SAME:
                container, _, leaf = other.rpartition(".")
                return f"{container}.{e}.{leaf}"
    return None


def _difference(mine: Any, theirs: Any, name: str, others: Mapping[str, Any]) -> str | None:
    """What is wrong with a tensor, in words; None when it equals the source's."""
    import torch

    if theirs is None:
        return "is not in the source"
    if _packed(mine) or mine.dtype != theirs.dtype:
        return f"is {mine.dtype}, the source's is {theirs.dtype}".replace("torch.", "")
    if mine.shape != theirs.shape:
        return f"has shape {list(mine.shape)}, the source's {list(theirs.shape)}"
    return None if torch.equal(_bits(mine), _bits(theirs)) else _other_values(mine, theirs, name, others)


def _other_values(mine: Any, theirs: Any, name: str, others: Mapping[str, Any]) -> str:
    """What a tensor holds that has the form of the source's and not its values."""
    import torch

    if not mine.any():
        return "is all zeros"
    if swapped := _swapped_halves(mine, theirs):
        return swapped
    for other, tensor in others.items():
        if other != name and tensor.shape == mine.shape and torch.equal(tensor, mine):
            return f"holds the values of {other}"
    share = float((_bits(mine) != _bits(theirs)).float().mean())
    cosine = cosine_of(Matrix(None, mine.reshape(1, -1)), Matrix(None, theirs.reshape(1, -1)))
    gain = float(mine.double().flatten() @ theirs.double().flatten() / theirs.double().square().sum())
    scaled = f"; it is about {gain:.3g} times the source's" if cosine > SAME and abs(gain - 1) > 0.01 else ""
    return f"differs from the source in {share:.1%} of its values, cosine {cosine:.4f}{scaled}"


def _swapped_halves(mine: Any, theirs: Any) -> str | None:
    import torch

    for dim, word in ((mine.dim() - 1, "columns (its inputs)"), (0, "rows (its outputs)")):
        if mine.dim() == 2 and mine.shape[dim] % 2 == 0:
            first, second = theirs.chunk(2, dim=dim)
            if torch.equal(mine, torch.cat((second, first), dim=dim)):
                return f"has the source's values with the two halves of its {word} swapped"
    return None


def _bits(tensor: Any) -> Any:
    import torch

    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def _packed(tensor: Any) -> bool:
    import torch

    return tensor.dtype in (torch.uint8, torch.float8_e4m3fn)


def _outside(name: str, weights: Weights, *, mtp: bool) -> bool:
    return name.startswith(MTP_PREFIX) if mtp else not name.startswith((f"{weights.architecture.prefix}layers.", MTP_PREFIX))


def _renamed(name: str, source: Weights, written: Weights) -> str:
    """A source's tensor name with the checkpoint's prefix of the decoder."""
    theirs, mine = source.architecture.prefix, written.architecture.prefix
    return mine + name.removeprefix(theirs) if theirs != mine and name.startswith(theirs) else name


def _stored_otherwise(name: str, written: Weights) -> bool:
    """Whether it is an expert's tensor of a head whose experts the checkpoint has in the other layout."""
    return EXPERTS in name and any(n.startswith(name.partition(EXPERTS)[0] + EXPERTS) for n in written.checkpoint)


def _groups(names: Iterable[str], weights: Weights) -> Iterable[list[str]]:
    group, nbytes = list[str](), 0
    for name in names:
        size = weights.checkpoint[name].nbytes
        if group and nbytes + size > GROUP_BYTES:
            yield group
            group, nbytes = [], 0
        group.append(name)
        nbytes += size
    if group:
        yield group
