"""Rules about routed experts: vLLM builds a layer's experts as one module, and never notices that one is missing."""

from collections.abc import Iterator

from assemble.architecture import EXPERT, MTP_PREFIX
from assemble.formats import COMPANIONS, NVFP4, SCHEMES, quantized_tensors
from assemble.rules.model import Detail, Served
from assemble.rules.subject import EXPERTS, Subject

FUSED_LEAVES = (f"{EXPERTS}.gate_up_proj", f"{EXPERTS}.down_proj")


def experts_complete(subject: Subject) -> Iterator[Detail]:
    """Q-9: each layer has experts 0 to E-1, each with all tensors of its three projections; none fused, none beyond E."""
    if not subject.architecture.moe:
        return
    leaves = {scheme: [spec.name for spec in quantized_tensors("", scheme, (16, 16))] for scheme in (*SCHEMES, NVFP4)}
    for module in subject.architecture.linear_modules:
        if f"{EXPERTS}." not in module:
            continue
        scheme = subject.modules.get(module)
        if scheme in leaves:
            names = [f"{module}{leaf}" for leaf in leaves[str(scheme)]]
        elif subject.architecture.split_experts:
            names = [f"{module}.weight"]
        else:
            continue  # fused and unquantized, Q-13's
        for name in names:
            if name not in subject.tensors:
                yield Detail(name, "absent", f"present: layers have {subject.architecture.num_experts} experts")
    yield from _unexpected(subject)


def _unexpected(subject: Subject) -> Iterator[Detail]:
    linear = subject.architecture.linear_modules
    quantized = any(f"{EXPERTS}." in module for module in subject.modules)
    for name in subject.tensors:
        if name.startswith(MTP_PREFIX) or f"{EXPERTS}." not in name:
            continue
        if name.endswith(FUSED_LEAVES):
            if quantized:
                yield Detail(name, "a fused tensor of all experts", "one set of 2-D tensors an expert", served=Served.LOUD)
        elif name.rpartition(".")[0] not in linear and EXPERT.search(name) and name.endswith((".weight", *COMPANIONS)):
            yield Detail(
                name, "an expert that config.json does not have", f"experts 0 to {subject.architecture.num_experts - 1}"
            )


def experts_do_not_inherit(subject: Subject) -> Iterator[Detail]:
    """Q-10: routed experts are listed or ignored when another module of their MLP is quantized."""
    seen = set()
    for module in subject.architecture.linear_modules:
        container, found, _ = module.partition(f"{EXPERTS}.")
        if not found or container in seen:
            continue
        seen.add(container)
        if subject.built.get(module) and module not in subject.modules:
            text = f"not listed: vLLM builds them {subject.built[module]}, as it finds listed beside them"
            served = Served.WORSE if subject.stored_quantized(module) else Served.LOUD
            yield Detail(f"quantized_layers: {container}{EXPERTS}", text, "listed, or in ignore", served=served)


def one_layout(subject: Subject) -> Iterator[Detail]:
    """Q-17: the experts of a model, or of an MTP head, are all fused or all split."""
    for prefix in (subject.architecture.prefix, MTP_PREFIX):
        experts = [n for n in subject.tensors if n.startswith(prefix) and f"{EXPERTS}." in n]
        fused = next((n for n in experts if n.endswith(FUSED_LEAVES)), None)
        split = next((n for n in experts if EXPERT.search(n)), None)
        if fused and split:
            packed = any(subject.tensors[n].dtype == "U8" for n in (fused, split))
            served = Served.LOUD if packed else Served.SILENT
            yield Detail(
                fused, f"fused, beside the split {split}", "one layout for all experts under one prefix", served=served
            )
