"""The MTP head: finding it whole in a checkpoint, so that it can be placed, byte for byte, in another one.

transformers has no code for the head and drops its tensors on load (`_keys_to_ignore_on_load_unexpected = ["^mtp.*"]`,
transformers 5.14 models/qwen3_5/modeling_qwen3_5.py), so a head never passes through a model: it goes from file to file.
vLLM loads a head with tensors missing without a word and then accepts no draft, so everything is checked here.
"""

from assemble.architecture import MTP_PREFIX, Architecture
from assemble.checkpoint import Checkpoint, TensorInfo
from assemble.errors import InputError


class HeadError(InputError):
    """An MTP head that is absent, incomplete, of the wrong shape, or not BF16."""


def find_head(checkpoint: Checkpoint, architecture: Architecture, option: str = "--mtp-from") -> dict[str, TensorInfo]:
    """The head's tensors, in the order `Architecture.mtp_tensors` lists them.

    Args:
        checkpoint: Where the head lies.
        architecture: Of the model that is to draft with it; it decides names and shapes.
        option: The option of the command at work that names another head, for the text of an error.

    Raises:
        HeadError: with the tensor's name and what to do.
    """
    expected = architecture.mtp_tensors
    present = {name for name in checkpoint if name.startswith(MTP_PREFIX)}
    where = checkpoint.root
    if not present:
        raise HeadError(
            f"{where} has no MTP head (no tensor named mtp.*), so nothing could draft. "
            f"If this is a fine-tune that lost it, take the base model's: {option} BASE_MODEL."
        )
    if missing := [name for name in expected if name not in present]:
        raise HeadError(
            f"{where}: the MTP head is incomplete: {missing[0]} is missing "
            f"({len(expected) - len(missing)} of {len(expected)} tensors are there). Take a whole one: {option} BASE_MODEL."
        )
    if extra := sorted(present - expected.keys()):
        raise HeadError(f"{where}: unexpected tensor {extra[0]} in the MTP head: vLLM knows no such parameter.")
    for name, shape in expected.items():
        tensor = checkpoint[name]
        if tensor.shape != shape:
            raise HeadError(
                f"{where}: {name} has shape {list(tensor.shape)}, the model needs {list(shape)}. "
                "The head must come from a model of the same size."
            )
        if tensor.dtype != "BF16":
            raise HeadError(
                f"{where}: {name} is {tensor.dtype}, expected BF16. A quantized or converted head cannot be restored "
                f"from itself; take the original: {option} BASE_MODEL."
            )
    return {name: checkpoint[name] for name in expected}
