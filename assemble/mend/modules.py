"""Repairs of quantized modules: incomplete ones, fused members with different tensor scales, listed but BF16 ones."""

import dataclasses

import numpy as np

from assemble.formats import COMPANIONS, FP8, W4A16_NVFP4, ShapeError, quantized_tensors
from assemble.mend.draft import Draft
from assemble.mend.origins import FP8FromBF16, NVFP4FromBF16, Rescaled, Stored
from assemble.nvfp4 import NumericError, amax, fp8_scale, tensor_scale

NEEDS_SOURCE = "the source's weight: give --source"


def whole_modules(draft: Draft) -> None:
    """A packed module has its weight and every scale, each with its dtype, shape and a possible value."""
    for module, shape in draft.modules.items():
        scheme = _intended(draft, module)
        if scheme is None:
            continue
        wrong = _wrong_parts(draft, module, scheme, shape)
        if scheme == W4A16_NVFP4 and f"{module}.input_scale" in draft.tensors:
            del draft.tensors[f"{module}.input_scale"]
            draft.mend(f"{module}.input_scale", "stored, though NVFP4 here is weight-only", "left out")
        if wrong == ["input_scale"]:
            _input_scale(draft, module)
        elif wrong == ["weight_scale_2"] and _sibling_scale(draft, module):
            continue
        elif wrong:
            where = f"{module}.{wrong[0]}" if len(wrong) == 1 else f"{module}.{{{','.join(wrong)}}}"
            _from_source(draft, module, scheme, where)


def _intended(draft: Draft, module: str) -> str | None:
    """The scheme of a module that is stored packed, or that lost its weight and is listed."""
    stored = draft.dtype(f"{module}.weight")
    return draft.scheme(module) if stored else (draft.listed(module) if draft.own_weight(module) is None else None)


def _wrong_parts(draft: Draft, module: str, scheme: str, shape: tuple[int, ...]) -> list[str]:
    try:
        expected = quantized_tensors(module, scheme, shape)
    except ShapeError:
        return []
    wrong = []
    for want in expected:
        leaf, have = want.name.rpartition(".")[2], draft.spec(want.name)
        shapes = ((), (1,)) if want.shape == () else (want.shape,)
        value = draft.scalar(want.name) if want.shape == () else None
        bad_value = value is not None and not (np.isfinite(value) and value > 0)
        suspect = module in draft.suspect and leaf != "input_scale"
        if have is None or have.dtype != want.dtype or have.shape not in shapes or bad_value or suspect:
            wrong.append(leaf)
    return wrong


def _input_scale(draft: Draft, module: str) -> bool:
    """Takes a lost input scale from a module that reads the same input: vLLM uses one for the fused group anyway."""
    for sibling in draft.group(module):
        origin, value = draft.tensors.get(f"{sibling}.input_scale"), draft.scalar(f"{sibling}.input_scale")
        if sibling != module and isinstance(origin, Stored) and value is not None and np.isfinite(value) and value > 0:
            draft.tensors[f"{module}.input_scale"] = origin
            draft.mend(f"{module}.input_scale", "absent or impossible", f"that of {sibling}, which reads the same input")
            return True
    draft.cannot(f"{module}.input_scale", "absent or impossible", "a calibration: quantize the source again")
    return False


def _sibling_scale(draft: Draft, module: str) -> bool:
    """Takes a lost tensor scale from its fused group, which shares one."""
    for sibling in draft.group(module):
        origin, value = draft.tensors.get(f"{sibling}.weight_scale_2"), draft.scalar(f"{sibling}.weight_scale_2")
        if sibling != module and isinstance(origin, Stored) and value is not None and np.isfinite(value) and value > 0:
            draft.tensors[f"{module}.weight_scale_2"] = origin
            draft.mend(f"{module}.weight_scale_2", "absent or impossible", f"that of {sibling}: the two share one")
            return True
    return False


def _from_source(draft: Draft, module: str, scheme: str, where: str) -> None:
    weight = draft.source_weight(module)
    if weight is None:
        draft.cannot(where, "absent, or wrong in dtype, shape or value", NEEDS_SOURCE)
        return
    if scheme == W4A16_NVFP4:
        _quantize_group(draft, module)
    else:
        draft.place(FP8FromBF16(module, weight, fp8_scale(_largest(module, weight))))
        if "input_scale" in _wrong_parts(draft, module, scheme, weight.tensor.shape):
            _input_scale(draft, module)
    draft.mend(where, "absent, or wrong in dtype, shape or value", f"{scheme} quantized anew from the source's weight")


def _group_scale(draft: Draft, module: str) -> np.float32:
    """The tensor scale of a module's fused group, from the source."""
    weights = {member: draft.source_weight(member) for member in draft.group(module)}
    return tensor_scale(np.max([_largest(member, w) for member, w in weights.items() if w is not None]))


def _largest(module: str, weight: Stored) -> np.float32:
    try:
        return amax(weight.bf16_rows())
    except NumericError as error:
        raise NumericError(f"{weight.path}: {module}: {error}") from error


def _quantize_group(draft: Draft, module: str) -> None:
    """Quantizes a module from the source; its group's other members too, where their tensor scale is another."""
    scale = _group_scale(draft, module)
    for member in draft.group(module):
        weight = draft.source_weight(member)
        if weight is not None and (member == module or draft.scalar(f"{member}.weight_scale_2") != scale):
            draft.place(NVFP4FromBF16(member, weight, scale))


def shared_tensor_scale(draft: Draft) -> None:
    """Gate and up have one `weight_scale_2`: vLLM uses one for both.

    With the source both are quantized anew. Without it, the member with the smaller scale is moved to the larger.
    """
    for module in draft.modules:
        group = draft.group(module)
        scales = {member: draft.scalar(f"{member}.weight_scale_2") for member in group}
        if module != group[0] or len(set(scales.values())) < 2 or None in scales.values():
            continue
        where, values = " ".join(group), ", ".join(f"{float(s):.6g}" for s in scales.values() if s is not None)
        found = f"weight_scale_2 {values}; vLLM uses one for both"
        if all(draft.source_weight(member) for member in group):
            scale = _group_scale(draft, module)
            for member in group:
                weight = draft.source_weight(member)
                if weight is not None:
                    draft.place(NVFP4FromBF16(member, weight, scale))
            draft.mend(where, found, "both quantized anew from the source, with the scale of their larger magnitude")
            continue
        largest = max(s for s in scales.values() if s is not None)
        for member in group:
            _rescale(draft, member, largest)
        draft.mend(where, found, "the smaller one's block scales moved to the larger scale; the error is stated when done")


def _rescale(draft: Draft, module: str, largest: np.float32) -> None:
    old = draft.scalar(f"{module}.weight_scale_2")
    weight, block_scale = draft.tensors.get(f"{module}.weight"), draft.tensors.get(f"{module}.weight_scale")
    if old is None or old == largest:
        return
    if isinstance(weight, NVFP4FromBF16):
        draft.place(dataclasses.replace(weight, scale=largest))
    elif isinstance(weight, Stored) and isinstance(block_scale, Stored):
        draft.place(Rescaled(module, weight, block_scale, old, largest))


def listed_but_plain(draft: Draft) -> None:
    """A module that is listed as quantized and stored BF16: quantized as its config says, or unlisted."""
    for module in draft.modules:
        scheme = None if draft.scheme(module) else _expected(draft, module)
        if scheme is None:
            continue
        own = draft.own_weight(module)
        weight = draft.source_weight(module) or own
        if own is None and draft.dtype(f"{module}.weight") is None:
            continue  # absent: noted elsewhere
        packed = [m for m in draft.group(module) if draft.scheme(m) is not None]
        if weight is not None and not draft.unlist and _quantize_plain(draft, module, scheme, weight, packed):
            draft.mend(module, f"stored unquantized, expected {scheme}", f"quantized to {scheme} from its BF16 weight")
        elif packed:
            draft.cannot(module, f"stored unquantized, {packed[0]} packed; vLLM fuses them", NEEDS_SOURCE)
        else:
            for leaf in COMPANIONS:
                draft.tensors.pop(f"{module}.{leaf}", None)
            draft.mend(module, f"stored unquantized, listed as {scheme}", "unlisted: it stays unquantized")
    _drop_fused_experts(draft)


def _expected(draft: Draft, module: str) -> str | None:
    """The scheme that vLLM expects a module in: as listed, or as a module that it fuses with this one is stored."""
    return draft.listed(module) or next((s for m in draft.group(module) if (s := draft.scheme(m)) is not None), None)


def _quantize_plain(draft: Draft, module: str, scheme: str, weight: Stored, packed: list[str]) -> bool:
    if scheme == FP8:
        if f"{module}.input_scale" not in draft.tensors:
            readers = [m for m in draft.group(module) if draft.scalar(f"{m}.input_scale") is not None]
            if not readers:
                return False
            draft.tensors[f"{module}.input_scale"] = draft.tensors[f"{readers[0]}.input_scale"]
        draft.place(FP8FromBF16(module, weight, fp8_scale(_largest(module, weight))))
        return True
    if draft.source_weight(module) is not None:
        _quantize_group(draft, module)
        return True
    scales = [tensor_scale(_largest(m, w)) for m in draft.group(module) if (w := draft.own_weight(m)) is not None]
    scales += [s for m in packed if (s := draft.scalar(f"{m}.weight_scale_2")) is not None]
    largest = max(scales)
    for member in packed:
        _rescale(draft, member, largest)
    draft.place(NVFP4FromBF16(module, weight, largest))
    return True


def _drop_fused_experts(draft: Draft) -> None:
    """Fused BF16 experts go once their split, packed successors are there."""
    for name in [n for n in draft.tensors if n.endswith((".mlp.experts.gate_up_proj", ".mlp.experts.down_proj"))]:
        container, _, leaf = name.rpartition(".")
        first = f"{container}.0.{'down_proj' if leaf == 'down_proj' else 'gate_proj'}"
        if not name.startswith("mtp.") and draft.scheme(first) is not None:
            del draft.tensors[name]
            draft.mend(name, "fused BF16 experts beside packed ones", "left out")
    draft.settle()


def stray_scales(draft: Draft) -> None:
    """Scales beside an unquantized weight are left out: vLLM has no parameter for them."""
    for module in draft.architecture.linear_modules:
        if draft.scheme(module) is None and draft.dtype(f"{module}.weight") is not None:
            for leaf in COMPANIONS:
                if draft.tensors.pop(f"{module}.{leaf}", None) is not None:
                    draft.mend(f"{module}.{leaf}", "a scale beside an unquantized weight", "left out")
        elif draft.scheme(module) == FP8 and draft.tensors.pop(f"{module}.weight_scale_2", None) is not None:
            draft.mend(f"{module}.weight_scale_2", "a scale that FP8 does not have", "left out")
