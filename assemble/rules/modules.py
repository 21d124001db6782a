"""Rules about the decoder's modules: which are quantized, and what their tensors look like."""

import math
from collections.abc import Iterator

import numpy as np

from assemble.architecture import LM_HEAD, MTP_PREFIX, VISION_PREFIX, fused_group
from assemble.formats import COMPANIONS, FP8, SCHEMES, W4A16_NVFP4, ShapeError, quantized_tensors
from assemble.resolution import PartialGroupError
from assemble.rules.model import Detail, Subject

COMPANION_SUFFIXES = tuple(f".{name}" for name in COMPANIONS)


def listed_modules_exist(subject: Subject) -> Iterator[Detail]:
    """Q-1: every key of quantized_layers names a module with a stored weight."""
    for module in subject.schemes:
        if f"{module}.weight" not in subject.tensors:
            yield f"quantized_layers[{module}]", "no such weight in the checkpoint", "the name of a stored module"


def _tensors_of(subject: Subject, scheme: str) -> Iterator[Detail]:
    linear = subject.architecture.linear_modules
    for module, listed in subject.schemes.items():
        if listed != scheme or module not in linear:
            continue
        try:
            expected = quantized_tensors(module, scheme, linear[module])
        except ShapeError as error:
            yield f"{module}.weight", str(error), "a shape the format can hold"
            continue
        for spec in expected:
            tensor = subject.tensors.get(spec.name)
            shapes = ((), (1,)) if spec.shape == () else (spec.shape,)
            if tensor is None or tensor.dtype != spec.dtype or tensor.shape not in shapes:
                found = "absent" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
                yield spec.name, found, f"{spec.dtype} {list(spec.shape)}"


def nvfp4_tensors(subject: Subject) -> Iterator[Detail]:
    """Q-2: names, dtypes and shapes of every NVFP4 module."""
    return _tensors_of(subject, W4A16_NVFP4)


def fp8_tensors(subject: Subject) -> Iterator[Detail]:
    """Q-3: names, dtypes and shapes of every FP8 module."""
    return _tensors_of(subject, FP8)


def quantized_weights_are_listed(subject: Subject) -> Iterator[Detail]:
    """Q-4: what is stored quantized is listed, and `ignore` does not take it out again."""
    for name, tensor in subject.tensors.items():
        module, _, leaf = name.rpartition(".")
        stored = leaf in COMPANIONS or (leaf == "weight" and tensor.dtype in ("U8", "F8_E4M3"))
        if stored and module not in subject.schemes:
            yield name, f"{tensor.dtype}, but its module is not in quantized_layers", "listed, or BF16"


def fused_groups_agree(subject: Subject) -> Iterator[Detail]:
    """Q-5: the modules that vLLM loads as one have one scheme, or none."""
    seen = set()
    for module in subject.schemes:
        group = fused_group(module)
        if not group or group in seen:
            continue
        seen.add(group)
        schemes = {member: subject.schemes.get(member) for member in group}
        if len(set(schemes.values())) > 1:
            yield " ".join(group), ", ".join(str(s) for s in schemes.values()), "one scheme for all, or none"


def gate_up_share_scale(subject: Subject) -> Iterator[Detail]:
    """Q-6: the members of a fused NVFP4 group have the same `weight_scale_2`, bit for bit."""
    for module, scheme in subject.schemes.items():
        group = fused_group(module)
        if scheme != W4A16_NVFP4 or not group or module != group[0]:
            continue
        names = [f"{member}.weight_scale_2" for member in group]
        if all(name in subject.tensors for name in names):
            values = [subject.read(name) for name in names]
            if len(set(values)) > 1:
                numbers = [float(np.frombuffer(v, "<f4")[0]) for v in values]
                yield " ".join(names), ", ".join(f"{n:.6g}" for n in numbers), "equal"


def only_the_recipes_modules(subject: Subject) -> Iterator[Detail]:
    """Q-11: nothing is quantized that vLLM builds unquantized."""
    linear = subject.architecture.linear_modules
    for module in subject.schemes:
        if module.startswith((MTP_PREFIX, VISION_PREFIX)) or (f"{module}.weight" in subject.tensors and module not in linear):
            yield f"quantized_layers[{module}]", "listed", "not listed: vLLM builds it in BF16"
        elif module.endswith((".in_proj_a", ".in_proj_b")):
            yield f"quantized_layers[{module}]", "listed", "not listed: too few rows for the kernels"


def known_names(subject: Subject) -> Iterator[Detail]:
    """Q-12: no tensor that vLLM has no parameter for."""
    body = subject.architecture.body_tensors
    for name in subject.tensors:
        if name in body or name.startswith(MTP_PREFIX) or (subject.architecture.wrapped and name.startswith(VISION_PREFIX)):
            continue
        base = next((name.removesuffix(s) for s in COMPANION_SUFFIXES if name.endswith(s)), None)
        if base is None or f"{base}.weight" not in body:
            yield name, "a name that the model does not have", f"names under {subject.architecture.prefix}"


def complete_body(subject: Subject) -> Iterator[Detail]:
    """Q-13: every tensor of the decoder is there, and has its shape where it is not quantized."""
    for name, shape in subject.architecture.body_tensors.items():
        tensor = subject.tensors.get(name)
        if tensor is None:
            if name != f"{LM_HEAD}.weight":  # CFG-3's
                yield name, "absent", f"shape {list(shape)}"
        elif name.removesuffix(".weight") not in subject.schemes and tensor.shape != shape:
            yield name, f"shape {list(tensor.shape)}", f"shape {list(shape)}"


def ignore_spares_the_quantized(subject: Subject) -> Iterator[Detail]:
    """IGN-2: no entry of `ignore` matches a quantized module, by any of vLLM's three matchers."""
    for entry in subject.ignore:
        if hit := subject.resolution.hits(entry, subject.schemes):
            yield f"ignore entry {entry!r}", f"excludes {len(hit)} quantized modules, {hit[0]} among them", "none"


def ignore_groups_whole(subject: Subject) -> Iterator[Detail]:
    """IGN-3: `ignore` names both or neither member of a fused group."""
    resolution = subject.resolution
    for module in subject.architecture.linear_modules:
        try:
            resolution.excluded(module)
        except PartialGroupError as error:
            yield f"ignore, for {module}", f"some members of {error}", "all members of the fused group, or none"


def ignore_covers_mtp(subject: Subject) -> Iterator[Detail]:
    """IGN-1: `ignore` names the MTP head."""
    if not any(entry.startswith("mtp") for entry in subject.ignore):
        yield "ignore", "no entry for the MTP head", "'mtp*'"


def scales_are_sound(subject: Subject) -> Iterator[Detail]:
    """Q-8: every scale is finite and positive; a block scale may be 0 (an all-zero block) but never NaN or negative."""
    for module, scheme in subject.schemes.items():
        for leaf in COMPANIONS if scheme in SCHEMES else ():
            tensor = subject.tensors.get(f"{module}.{leaf}")
            if tensor is None:
                continue
            if tensor.dtype == "F32" and tensor.nbytes == 4:
                value = float(np.frombuffer(subject.read(tensor.name), "<f4")[0])
                if not math.isfinite(value) or value <= 0:
                    yield tensor.name, f"{value:g}", "finite and positive"
            elif tensor.dtype == "F8_E4M3":
                codes = np.frombuffer(subject.read(tensor.name), np.uint8)
                if bad := int(np.count_nonzero(codes >= 0x7F)):
                    yield tensor.name, f"{bad} of {codes.size} block scales NaN or negative", "E4M3 from 0 to 448"
            subject.progress(tensor.nbytes)
