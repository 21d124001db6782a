"""Rules about the decoder's modules: which are quantized, and what their tensors look like."""

import re
from collections.abc import Iterator

from assemble.architecture import EXPERT, LM_HEAD, MTP_PREFIX, VISION_PREFIX, experts_container, fused_group
from assemble.formats import COMPANIONS, FP8, NVFP4, W4A16_NVFP4, ShapeError, quantized_tensors
from assemble.rules.model import Detail, Mend, Served, Severity
from assemble.rules.subject import EXPERTS, QUANTIZED_DTYPES, Subject
from assemble.vision import vision_tensors

COMPANION_SUFFIXES = tuple(f".{name}" for name in COMPANIONS)
KV_SCALE = re.compile(r"\.self_attn\.(?:(?:k|v|qkv)_proj\.|attn\.)?[kv]_scale$")
ROW_PARALLEL = (".down_proj.weight", ".o_proj.weight", ".out_proj.weight")  # vLLM cuts what does not fit, without a word
LAYER = re.compile(r"\.layers\.\d+")
LEFTOVERS = ("_quantizer", "_amax", "pre_quant_scale")
W, INFO = Severity.WARNING, Severity.INFO


def listed_modules_exist(subject: Subject) -> Iterator[Detail]:
    """Q-1: every key of quantized_layers names a module with a stored weight, or a layer's experts."""
    containers = {n.partition(f"{EXPERTS}.")[0] + EXPERTS for n in subject.tensors if f"{EXPERTS}." in n}
    for module in subject.listed:
        if f"{module}.weight" not in subject.tensors and module not in containers:
            yield Detail(f"quantized_layers[{module}]", "no such weight in the checkpoint", "the name of a stored module")


def _tensors_of(subject: Subject, schemes: tuple[str, ...]) -> Iterator[Detail]:
    linear = subject.architecture.linear_modules
    for module, scheme in subject.modules.items():
        if scheme not in schemes or module not in linear:
            continue
        try:
            expected = quantized_tensors(module, scheme, linear[module])
        except ShapeError as error:
            yield Detail(f"{module}.weight", str(error), "a shape the format can hold")
            continue
        for spec in expected:
            tensor = subject.tensors.get(spec.name)
            shapes = ((), (1,)) if spec.shape == () else (spec.shape,)
            if tensor is None and f"{EXPERTS}." in module:
                continue  # Q-9's
            if tensor is None or tensor.dtype != spec.dtype or tensor.shape not in shapes:
                found = "absent" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
                cut = spec.name.endswith(ROW_PARALLEL) and f"{EXPERTS}." not in module
                misfit = tensor is not None and tensor.shape not in shapes
                served = Served.LOUD if misfit and not cut else Served.SILENT
                yield Detail(spec.name, found, f"{spec.dtype} {list(spec.shape)}", served=served)


def nvfp4_tensors(subject: Subject) -> Iterator[Detail]:
    """Q-2: every NVFP4 module has a packed weight, block scales and a tensor scale, of the right dtypes and shapes."""
    yield from _tensors_of(subject, (W4A16_NVFP4, NVFP4))
    for module, scheme in subject.modules.items():
        if scheme == W4A16_NVFP4 and f"{module}.input_scale" in subject.tensors:
            yield Detail(f"{module}.input_scale", "present", "absent: vLLM loads it and drops it", W, Served.WORSE)


def fp8_tensors(subject: Subject) -> Iterator[Detail]:
    """Q-3: every FP8 module has an E4M3 weight, a weight_scale and an input_scale, of the right dtypes and shapes."""
    return _tensors_of(subject, (FP8,))


def quantized_weights_are_listed(subject: Subject) -> Iterator[Detail]:
    """Q-4: what is stored quantized is quantized in vLLM's eyes: listed, or not excluded from a plain algorithm."""
    for name, tensor in subject.tensors.items():
        module, _, leaf = name.rpartition(".")
        stored = leaf in COMPANIONS or (leaf == "weight" and tensor.dtype in QUANTIZED_DTYPES)
        if stored and module not in subject.modules and not name.startswith(MTP_PREFIX):
            alone = not any(f"{module}.{companion}" in subject.tensors for companion in COMPANIONS)
            served = Served.SILENT if alone and tensor.dtype != "U8" else Served.LOUD
            found = f"{tensor.dtype}, but its module is not listed"
            yield Detail(name, found, "listed in quantized_layers, or BF16", served=served)


def fused_groups_agree(subject: Subject) -> Iterator[Detail]:
    """Q-5: modules that vLLM loads as one (q/k/v, gate/up, in_proj_qkv/z, in_proj_b/a, experts) have one algorithm or none."""
    seen = set()
    for module in subject.modules:
        group = fused_group(module)
        if not group or group in seen:
            continue
        seen.add(group)
        schemes = {member: subject.modules.get(member) for member in group}
        if len(set(schemes.values())) > 1:
            found = ", ".join(f"{m.rpartition('.')[2]} {s or 'unlisted'}" for m, s in schemes.items())
            served = Served.LOUD if len({s for s in schemes.values() if s}) > 1 else _inferred(subject, group)
            yield Detail(
                f"quantized_layers: {module}", found, "one algorithm for the whole fused group, or none", served=served
            )
    experts: dict[str, set[str | None]] = {}
    for module in subject.architecture.linear_modules:
        if f"{EXPERTS}." in module:
            experts.setdefault(module.partition(f"{EXPERTS}.")[0] + EXPERTS, set()).add(subject.modules.get(module))
    for container, found_schemes in experts.items():
        if len(found_schemes) > 1:
            names = sorted(str(scheme or "unlisted") for scheme in found_schemes)
            yield Detail(
                f"quantized_layers: {container}", ", ".join(names), "one algorithm for all experts of a layer, or none"
            )


def _inferred(subject: Subject, group: tuple[str, ...]) -> Served:
    """vLLM takes an unlisted member for what its siblings are: right when it is stored so."""
    return Served.WORSE if all(subject.stored_quantized(member) for member in group) else Served.SILENT


def only_the_recipes_modules(subject: Subject) -> Iterator[Detail]:
    """Q-11: the router, gates, conv1d, norms, embeddings, in_proj_a/b and the vision tower are BF16 and not listed."""
    linear = subject.architecture.linear_modules
    for module in subject.modules:
        where = f"quantized_layers[{module}]"
        if module.endswith((".in_proj_a", ".in_proj_b")):
            yield Detail(where, "quantized", "BF16: too few rows for the kernels")
        elif module.startswith(VISION_PREFIX) or module.endswith((".mlp.gate", ".shared_expert_gate")):
            yield Detail(where, "quantized", "BF16")
        elif not module.startswith(MTP_PREFIX) and f"{module}.weight" in subject.tensors and module not in linear:
            yield Detail(where, "listed", "not listed: vLLM builds it in BF16")
    for name, tensor in subject.tensors.items():
        module = name.removesuffix(".weight")
        if name.startswith(MTP_PREFIX) or module in subject.modules or name.endswith(COMPANION_SUFFIXES):
            continue
        small = len(tensor.shape) == 1 and tensor.dtype == "F32"  # A_log and norms, which some publish in F32
        if tensor.dtype == "BF16" or small or (KV_SCALE.search(name) and tensor.dtype == "F32"):
            continue
        if tensor.dtype in ("F32", "F16"):
            yield Detail(name, f"{tensor.dtype} {list(tensor.shape)}", "BF16", W, Served.WORSE, Mend.REPAIR_FROM_SOURCE)
        elif module not in linear:
            yield Detail(name, f"{tensor.dtype} {list(tensor.shape)}", "BF16", mend=Mend.REPAIR_FROM_SOURCE)


def known_names(subject: Subject) -> Iterator[Detail]:
    """Q-12: no tensor has a name that the model does not have."""
    body, vision = subject.architecture.body_tensors, _vision(subject)
    linear = subject.architecture.linear_modules
    for name in subject.tensors:
        if name in body or name.startswith(MTP_PREFIX) or (vision is not None and name in vision):
            continue
        if vision is None and subject.architecture.wrapped and name.startswith(VISION_PREFIX):
            continue
        base = next((name.removesuffix(s) for s in COMPANION_SUFFIXES if name.endswith(s)), None)
        if base in linear or KV_SCALE.search(name):
            continue
        ignored = name.endswith((".bias", ".q_scale", ".kv_scale", ".g_idx", "_zero_point", "rotary_emb.inv_freq"))
        served = Served.SILENT if ignored else Served.LOUD
        kind = (
            "a leftover of the quantizer" if any(part in name for part in LEFTOVERS) else "a name that the model does not have"
        )
        yield Detail(name, kind, f"names under {subject.architecture.prefix}", served=served)


def _vision(subject: Subject) -> dict[str, tuple[int, ...]] | None:
    return vision_tensors(subject.config) if subject.architecture.wrapped else {}


def complete_body(subject: Subject) -> Iterator[Detail]:
    """Q-13: every tensor of the decoder and of the vision tower is there, of its shape where it is not quantized."""
    vision = _vision(subject) or {}
    tower = any(name in subject.tensors for name in vision)
    packed_experts = any(f"{EXPERTS}." in module for module in subject.modules)
    if vision and not tower:
        yield Detail(f"{VISION_PREFIX}*", "no tensor", "the tower, or serve with --language-model-only", W, Served.SILENT)
    for name, shape in (subject.architecture.body_tensors | (vision if tower else {})).items():
        tensor = subject.tensors.get(name)
        if tensor is None:
            quantized = name.removesuffix(".weight") in subject.modules  # Q-1 and Q-2's; then CFG-3's; then Q-9's
            others = name == f"{LM_HEAD}.weight" or EXPERT.search(name) or (packed_experts and f"{EXPERTS}." in name)
            if not quantized and not others:
                yield Detail(name, "absent", f"shape {list(shape)}")
        elif name.removesuffix(".weight") not in subject.modules and tensor.shape != shape:
            yield Detail(name, f"shape {list(tensor.shape)}", f"shape {list(shape)}")


def covered_everywhere(subject: Subject) -> Iterator[Detail]:
    """Q-16: a kind of module that is quantized in one layer is quantized in all layers that have it."""
    kinds: dict[str, dict[str | None, str]] = {}
    for module in subject.architecture.linear_modules:
        container = experts_container(module)
        leaf = module.rpartition(".")[2] if container != module else ""
        kind = f"{LAYER.sub('.layers.*', container)} {leaf}"
        kinds.setdefault(kind, {}).setdefault(subject.modules.get(module), module)
    for found in kinds.values():
        if None in found and len(found) > 1:
            yield Detail(found[None], "not quantized, though its like in other layers is", "quantized, or none of its kind")
