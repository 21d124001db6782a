"""The oracle: a whole transformers model in memory that computes with a checkpoint's files, written without our reader.

Weights are dequantized by the reference of `assemble.dequantize` (numpy). FP8 inputs are rounded by a wrapper around each
linear layer, keys and values by an attention function that is registered with transformers.
"""

from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from assemble.checkpoint import Checkpoint
from assemble.dequantize import dequantize_fp8, dequantize_nvfp4


def e4m3(values: torch.Tensor) -> torch.Tensor:
    return values.float().clamp(-448, 448).to(torch.float8_e4m3fn).float()


def attention(module, query, key, value, mask, **options):
    key, value = e4m3(key).to(key.dtype), e4m3(value).to(value.dtype)
    return sdpa_attention_forward(module, query, key, value, mask, **options)


AttentionInterface.register("sdpa_fp8_cache", attention)


class RoundedInput(torch.nn.Module):
    def __init__(self, linear: torch.nn.Linear, scale: float) -> None:
        super().__init__()
        self.linear, self.scale = linear, scale

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        scale = torch.tensor(self.scale)
        return self.linear((e4m3(values.float() * (1 / scale)) * scale).to(values.dtype))


def array(checkpoint: Checkpoint, name: str, kind: type) -> np.ndarray:
    return np.frombuffer(checkpoint.read(name), kind).reshape(checkpoint[name].shape)


FUSED = (("q_proj", "k_proj", "v_proj"), ("in_proj_qkv", "in_proj_z"))


def group_scale(checkpoint: Checkpoint, module: str) -> float:
    """The largest FP8 scale of what vLLM fuses with the module."""
    parent, _, leaf = module.rpartition(".")
    members = next((group for group in FUSED if leaf in group), (leaf,))
    return max(float(array(checkpoint, f"{parent}.{m}.weight_scale", np.float32)) for m in members)


def served_values(checkpoint: Checkpoint, module: str) -> torch.Tensor:
    """As vLLM computes: an FP8 member of a fused group is encoded again with the group's scale."""
    if checkpoint[f"{module}.weight"].dtype == "F8_E4M3":
        own, scale = float(array(checkpoint, f"{module}.weight_scale", np.float32)), group_scale(checkpoint, module)
        if scale != own:
            codes = torch.from_numpy(dequantize_fp8(array(checkpoint, f"{module}.weight", np.uint8), 1.0))
            again = e4m3((codes.half() * torch.tensor(own)).float() * (1 / torch.tensor(scale)))
            return (again * torch.tensor(scale)).bfloat16()
    return values_of(checkpoint, module)


def values_of(checkpoint: Checkpoint, module: str) -> torch.Tensor:
    weight = array(checkpoint, f"{module}.weight", np.uint8)
    if checkpoint[f"{module}.weight"].dtype == "U8":
        scale = float(array(checkpoint, f"{module}.weight_scale_2", np.float32))
        values = dequantize_nvfp4(weight, array(checkpoint, f"{module}.weight_scale", np.uint8), scale)
    else:
        values = dequantize_fp8(weight, float(array(checkpoint, f"{module}.weight_scale", np.float32)))
    return torch.from_numpy(values).bfloat16()


def resident_model(source: Path, written: Path | None) -> torch.nn.Module:
    """The source's model; with `written`, its quantized modules replaced by what that checkpoint holds."""
    model_class = getattr(transformers, Checkpoint.open(source).config["architectures"][0])
    model = model_class.from_pretrained(source, dtype=torch.bfloat16, local_files_only=True).eval()
    model.config.get_text_config()._experts_implementation = "eager"
    if written is None:
        return model
    made = Checkpoint.open(written)
    model.set_attn_implementation(
        {"text_config": "sdpa_fp8_cache"} if hasattr(model.config, "text_config") else "sdpa_fp8_cache"
    )
    for name in made:
        module, _, leaf = name.rpartition(".")
        if leaf != "weight_scale" or module.startswith("mtp."):
            continue
        if ".mlp.experts." in module:
            place_expert(model, module, values_of(made, module))
            continue
        linear = model.get_submodule(module)
        linear.weight.data = served_values(made, module)
        if f"{module}.input_scale" in made:
            parent, _, own = module.rpartition(".")
            setattr(
                model.get_submodule(parent), own, RoundedInput(linear, float(array(made, f"{module}.input_scale", np.float32)))
            )
    return model


def place_expert(model: torch.nn.Module, module: str, values: torch.Tensor) -> None:
    container, number, leaf = module.rsplit(".", 2)
    experts, rows = model.get_submodule(container), len(values)
    if leaf == "down_proj":
        experts.down_proj.data[int(number)] = values
    else:
        first = rows if leaf == "up_proj" else 0
        experts.gate_up_proj.data[int(number), first : first + rows] = values


def log_probabilities(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=ids, use_cache=False).logits.float().log_softmax(-1)
