"""Rules about the MTP head. vLLM says nothing when a head is incomplete: it drafts, and no draft is ever accepted."""

from collections.abc import Iterator

from assemble.architecture import EXPERT, MTP_PREFIX
from assemble.rules.model import Detail, Mend, Served
from assemble.rules.modules import KV_SCALE
from assemble.rules.subject import EXPERTS, Subject

UNUSED = "mtp.embed_tokens.weight"


def head_names_and_shapes(subject: Subject) -> Iterator[Detail]:
    """MTP-1: the head's tensors are exactly those of the architecture, with their shapes, under `mtp.`."""
    expected = subject.architecture.mtp_tensors if subject.has_head else {}
    for name, shape in expected.items():
        tensor = subject.tensors.get(name)
        if tensor is None:
            yield Detail(name, "absent", f"shape {list(shape)}")
        elif tensor.shape != shape:
            served = Served.SILENT if EXPERTS in name else Served.LOUD
            yield Detail(name, f"shape {list(tensor.shape)}", f"shape {list(shape)}", served=served)
    for name in subject.tensors:
        extra = name.startswith(MTP_PREFIX) and name not in expected and name != UNUSED and not KV_SCALE.search(name)
        elsewhere = f".{MTP_PREFIX}" in name
        if extra or elsewhere:
            unread = name.endswith(".bias") or EXPERT.search(name) or not name.startswith((MTP_PREFIX, f"model.{MTP_PREFIX}"))
            served = Served.SILENT if unread else Served.LOUD
            yield Detail(name, "unexpected", "one of the head's names, which start with 'mtp.'", served=served)


def head_bf16(subject: Subject) -> Iterator[Detail]:
    """MTP-2: the head is BF16, and vLLM builds it so: not listed, and excluded from a plain algorithm."""
    for name, tensor in subject.tensors.items():
        if name.startswith(MTP_PREFIX) and tensor.dtype != "BF16" and not KV_SCALE.search(name):
            served = Served.SILENT if EXPERTS in name else Served.LOUD
            served = Served.WORSE if tensor.dtype in ("F32", "F16") else served
            yield Detail(name, tensor.dtype, "BF16", served=served)
    for module in subject.listed:
        if module.startswith(MTP_PREFIX):
            effect = None if subject.built.get(module) else Served.WORSE  # ignore takes it out again
            yield Detail(f"quantized_layers[{module}]", "listed", "not listed", served=effect, mend=Mend.REPAIR)
    for module in subject.architecture.mtp_linear_modules if subject.has_head else ():
        algo = subject.built.get(module)
        if algo and module not in subject.listed:
            yield Detail(module, f"vLLM builds it {algo}", "BF16: excluded by ignore", mend=Mend.REPAIR)


def no_embedding_of_its_own(subject: Subject) -> Iterator[Detail]:
    """MTP-5: the head has no embedding of its own: vLLM replaces it by the body's."""
    if UNUSED in subject.tensors:
        yield Detail(UNUSED, "present", "absent")
