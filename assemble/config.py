"""The two config files of a quantized checkpoint, as one truth.

`config.json` is the source's own JSON with `quantization_config` added; vLLM reads that. `hf_quant_config.json` is the
older twin that SGLang and TensorRT-LLM read; its `exclude_modules` is the other's `ignore`, its `kv_cache_quant_algo`
the other's `kv_cache_scheme`. When the two differ, servers differ: NVIDIA's own 35B-A3B declares FP8 KV in one only, and
vLLM serves it with BF16 KV. So both are made from the same arguments, here.

Layout: modelopt 0.47 torch/export/convert_hf_config.py `convert_hf_quant_config_format`; what vLLM reads of it:
vLLM 0.33 model_executor/layers/quantization/modelopt.py `ModelOptMixedPrecisionConfig._from_config`.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from assemble.architecture import VISION_PREFIX, Architecture
from assemble.formats import BLOCK, FP8, SCHEMES, layer_entry
from assemble.plan import AssemblyPlan, natural

KV_FP8 = {"dynamic": False, "num_bits": 8, "type": "float"}
MTP_IGNORE = ("mtp*", "mtp.layers.0*")  # as nvidia/Qwen3.6-27B-NVFP4 spells it


def ignore_list(plan: AssemblyPlan) -> list[str]:
    """Every module that stays unquantized though it could hold a quantized weight, by full name; then towers and head.

    Naming both `in_proj_a` and `in_proj_b` keeps vLLM from inferring a format for their fused `in_proj_ba`
    (vllm#47241); one of the two alone makes it raise.
    """
    entries = [*plan.left, *(n.removesuffix(".weight") for n in plan.copies if n.endswith(".conv1d.weight"))]
    entries.sort(key=natural)
    if plan.architecture.wrapped:
        entries.append(VISION_PREFIX.rstrip(".") + "*")
    return [*entries, *MTP_IGNORE]


def quantization_config(schemes: Mapping[str, str], ignore: Sequence[str], modelopt_version: str) -> dict[str, Any]:
    """The `quantization_config` of config.json."""
    return {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "producer": _producer(modelopt_version),
        "kv_cache_scheme": dict(KV_FP8),
        "ignore": list(ignore),
        "config_groups": _config_groups(schemes),
        "quantized_layers": {module: layer_entry(scheme) for module, scheme in schemes.items()},
    }


def hf_quant_config(schemes: Mapping[str, str], ignore: Sequence[str], modelopt_version: str) -> dict[str, Any]:
    """The whole of hf_quant_config.json."""
    return {
        "producer": _producer(modelopt_version),
        "quantization": {
            "quant_algo": "MIXED_PRECISION",
            "kv_cache_quant_algo": "FP8",
            "exclude_modules": list(ignore),
            "quantized_layers": {module: layer_entry(scheme) for module, scheme in schemes.items()},
        },
    }


def complete_config(source: Mapping[str, Any], architecture: Architecture) -> tuple[dict[str, Any], list[str]]:
    """The source's config.json, with what a served checkpoint needs filled in where the source lacks it.

    Returns:
        The config, and a sentence for each change made (none for a sound source).
    """
    config, changes = copy.deepcopy(dict(source)), []
    text = config["text_config"] if architecture.wrapped else config
    if not architecture.num_mtp_layers:
        changes.append(f"mtp_num_hidden_layers: {text.get('mtp_num_hidden_layers')!r} -> 1 (the head is there)")
        text["mtp_num_hidden_layers"] = 1
    if not any(place.get(key) for place in (config, text) for key in ("dtype", "torch_dtype")):
        changes.append("dtype: absent -> 'bfloat16'")
        config["dtype"] = "bfloat16"
    return config, changes


def _producer(modelopt_version: str) -> dict[str, str]:
    return {"name": "modelopt", "version": modelopt_version}


def _config_groups(schemes: Mapping[str, str]) -> dict[str, Any]:
    """compressed-tensors' spelling of the same facts, one group a scheme; vLLM's mixed method does not read it."""
    groups: dict[str, Any] = {}
    for scheme in SCHEMES:
        if targets := sorted(m for m, s in schemes.items() if s == scheme):
            groups[f"group_{len(groups)}"] = _weights_and_inputs(scheme) | {"targets": targets}
    return groups


def _weights_and_inputs(scheme: str) -> dict[str, Any]:
    if scheme == FP8:
        eight = {"dynamic": False, "num_bits": 8, "type": "float"}
        return {"input_activations": eight, "weights": dict(eight)}
    return {"weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": BLOCK}}
