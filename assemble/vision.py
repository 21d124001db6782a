"""The vision tower's tensors, which are copied as they are and must all be there.

vLLM loads a multimodal checkpoint whose tower is absent or incomplete without a word, and then describes noise.
Shapes: transformers 5.14 models/qwen3_5/modeling_qwen3_5.py `Qwen3_5VisionModel`.
"""

from collections.abc import Mapping
from typing import Any

from assemble.architecture import VISION_PREFIX, Shape

_FIELDS = (
    "depth",
    "hidden_size",
    "intermediate_size",
    "in_channels",
    "temporal_patch_size",
    "patch_size",
    "spatial_merge_size",
    "num_position_embeddings",
    "out_hidden_size",
)
_DEPTH_LIMIT = 1000


def vision_tensors(config: Mapping[str, Any]) -> dict[str, Shape] | None:
    """Name and shape of every tensor of the tower that config.json's `vision_config` describes.

    Returns:
        None when there is no `vision_config`, when a field is absent or malformed, or when the tower has deepstack mergers
        (no model of this family has): nothing can be said about its tensors then.
    """
    vision = config.get("vision_config")
    if not isinstance(vision, Mapping) or vision.get("deepstack_visual_indexes"):
        return None
    values = [vision.get(field) for field in _FIELDS]
    numbers = [value for value in values if type(value) is int and 0 < value < 2**31]
    if len(numbers) != len(_FIELDS) or numbers[0] > _DEPTH_LIMIT:
        return None
    depth, hidden, inner, channels, frames, patch, merge, positions, out = numbers
    merged = hidden * merge * merge
    tensors: dict[str, Shape] = {
        "patch_embed.proj.weight": (hidden, channels, frames, patch, patch),
        "patch_embed.proj.bias": (hidden,),
        "pos_embed.weight": (positions, hidden),
        **_layer_norm("merger.norm", hidden),
        **_linear("merger.linear_fc1", merged, merged),
        **_linear("merger.linear_fc2", out, merged),
    }
    for i in range(depth):
        block = f"blocks.{i}"
        tensors |= _layer_norm(f"{block}.norm1", hidden) | _layer_norm(f"{block}.norm2", hidden)
        tensors |= _linear(f"{block}.attn.qkv", 3 * hidden, hidden) | _linear(f"{block}.attn.proj", hidden, hidden)
        tensors |= _linear(f"{block}.mlp.linear_fc1", inner, hidden) | _linear(f"{block}.mlp.linear_fc2", hidden, inner)
    return {VISION_PREFIX + name: shape for name, shape in tensors.items()}


def _linear(module: str, rows: int, columns: int) -> dict[str, Shape]:
    return {f"{module}.weight": (rows, columns), f"{module}.bias": (rows,)}


def _layer_norm(module: str, size: int) -> dict[str, Shape]:
    return {f"{module}.weight": (size,), f"{module}.bias": (size,)}
