"""Rules about the MTP head. vLLM says nothing when a head is incomplete: it drafts, and no draft is ever accepted."""

from collections.abc import Iterator

from assemble.architecture import MTP_PREFIX
from assemble.rules.model import Detail, Subject


def head_names_and_shapes(subject: Subject) -> Iterator[Detail]:
    """MTP-1: the head's tensors are exactly those of the architecture, with their shapes."""
    expected = subject.architecture.mtp_tensors
    for name, shape in expected.items():
        tensor = subject.tensors.get(name)
        if tensor is None or tensor.shape != shape:
            yield name, "absent" if tensor is None else f"shape {list(tensor.shape)}", f"shape {list(shape)}"
    for name in subject.tensors:
        misplaced = ".mtp." in name
        if misplaced or (name.startswith(MTP_PREFIX) and name not in expected):
            yield name, "unexpected", "one of the head's names, which start with 'mtp.'"


def head_bf16(subject: Subject) -> Iterator[Detail]:
    """MTP-2: the head is BF16 and not listed as quantized."""
    for name, tensor in subject.tensors.items():
        if name.startswith(MTP_PREFIX) and tensor.dtype != "BF16":
            yield name, tensor.dtype, "BF16"
    for module in subject.schemes:
        if module.startswith(MTP_PREFIX):
            yield f"quantized_layers[{module}]", "listed", "not listed"
