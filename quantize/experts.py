"""The routed experts of a mixture: packed many at a time, with ModelOpt's own arithmetic.

transformers holds a layer's experts as two 3-D tensors, `gate_up_proj` [E, 2I, H] and `down_proj` [E, H, I], whichever way
the checkpoint stores them. NVFP4 here is weight-only, so no expert needs to have seen a token: an expert's scales follow
from its weights. Gate and up of one expert share `weight_scale_2`: its amax is that of the fused matrix.

ModelOpt's stock exporter packs each projection of each expert by itself (modelopt 0.47 torch/export/moe_utils.py
`_export_fused_experts`), which is what most of its time goes to. Here `NVFP4QTensor` is given whole stacks of experts,
with a tensor scale for each: the same operations on the same numbers, so the same bytes, as a test shows.
"""

from collections.abc import Iterator
from typing import Any

from assemble.architecture import Architecture
from assemble.formats import BLOCK, COMPANIONS, W4A16_NVFP4
from quantize.model import checkpoint_name
from quantize.modelopt_recipe import ModelOptRecipe

CONTAINER = ".mlp.experts"
WEIGHTS_AT_ONCE = 64_000_000  # weights packed in one go; about 1.5 GB of temporaries
E2M1_MAX, E4M3_MAX = 6.0, 448.0


def packs_in_batches(recipe: ModelOptRecipe) -> bool:
    """Whether experts are packed here. The MSE sweep is per expert and stays ModelOpt's own, on CUDA."""
    return recipe.method == "max"


def found(model: Any, architecture: Architecture) -> dict[str, str]:
    """The containers of routed experts that the model has, whole, by checkpoint name -> scheme."""
    if not architecture.moe:
        return {}
    containers = {}
    for name, module in model.named_modules():
        if not name.endswith(CONTAINER):
            continue
        stored = checkpoint_name(name, architecture)
        rows, columns = architecture.linear_modules.get(f"{stored}.0.gate_proj", (0, 0))
        count = architecture.num_experts
        shapes = tuple(module.gate_up_proj.shape), tuple(module.down_proj.shape)
        if shapes == ((count, 2 * rows, columns), (count, columns, rows)):
            containers[stored] = W4A16_NVFP4
    return containers


def export(stored: str, module: Any, recipe: ModelOptRecipe) -> Iterator[dict[str, Any]]:
    """Packs a layer's experts and yields their tensors by checkpoint name, some experts at a time.

    Args:
        stored: The container's checkpoint name.
        module: The container; its weights are released.
        recipe: What was done to the model.
    """
    if not packs_in_batches(recipe):
        yield from _export_stock(stored, module)
        return
    half = module.gate_up_proj.shape[1] // 2
    for first, packed in _packed(module.gate_up_proj):
        yield _named(stored, first, "gate_proj", [p[:, :half] for p in packed[:2]], packed[2])
        yield _named(stored, first, "up_proj", [p[:, half:] for p in packed[:2]], packed[2])
    module.gate_up_proj = None
    for first, packed in _packed(module.down_proj):
        yield _named(stored, first, "down_proj", packed[:2], packed[2])
    module.down_proj = None


def pack(weights: Any) -> tuple[Any, Any, Any]:
    """Packs a stack of BF16 matrices [E, N, K] to NVFP4, each with its own tensor scale.

    Returns:
        `weight` uint8 [E, N, K/2], `weight_scale` float8_e4m3fn [E, N, K/16], `weight_scale_2` float32 [E].
    """
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    tensor_scale = weights.abs().amax(dim=(1, 2), keepdim=True).float() / (E2M1_MAX * E4M3_MAX)
    block_scale, _ = NVFP4QTensor.get_weights_scaling_factor(weights, BLOCK, tensor_scale)
    packed, _, _ = NVFP4QTensor.quantize(weights, BLOCK, block_scale, tensor_scale)
    return packed._quantized_data, block_scale, tensor_scale.reshape(-1)


def _packed(weights: Any) -> Iterator[tuple[int, tuple[Any, Any, Any]]]:
    step = max(1, WEIGHTS_AT_ONCE // weights[0].numel())
    for first in range(0, len(weights), step):
        yield first, pack(weights[first : first + step])


def _named(stored: str, first: int, projection: str, packed: Any, tensor_scale: Any) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for i, (weight, block_scale, scale) in enumerate(zip(*packed, tensor_scale, strict=True)):
        module = f"{stored}.{first + i}.{projection}"
        named |= {f"{module}.weight": weight, f"{module}.weight_scale": block_scale, f"{module}.weight_scale_2": scale}
    return named


def _export_stock(stored: str, module: Any) -> Iterator[dict[str, Any]]:
    import torch
    from modelopt.torch.export.moe_utils import _export_fused_experts

    _export_fused_experts(module, torch.bfloat16)
    for number, expert in list(module.named_children()):
        if number.isdigit():
            for projection, part in expert.named_children():
                yield tensors_of(f"{stored}.{number}.{projection}", part)
            delattr(module, number)


def tensors_of(stored: str, module: Any) -> dict[str, Any]:
    """A packed module's tensors by checkpoint name."""
    leaves = ("weight", *COMPANIONS)
    return {f"{stored}.{leaf}": getattr(module, leaf) for leaf in leaves if hasattr(module, leaf)}
