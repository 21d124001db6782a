"""Post-training quantization: ModelOpt does it, this module feeds it, checks it and takes the results out.

ModelOpt's numerics and its exporter's packing are used as they are, a module at a time: `_export_quantized_weight` is
what its own `export_hf_checkpoint` calls for each module (modelopt 0.47 torch/export/unified_export_hf.py), and a test
holds the bytes against that exporter's. Going module by module bounds memory, shows progress, and writes each shard once.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from assemble.architecture import Architecture
from quantize import experts
from quantize.errors import CheckFailedError
from quantize.model import checkpoint_name
from quantize.modelopt_recipe import ModelOptRecipe


class CoverageError(CheckFailedError):
    """ModelOpt quantized other modules than the plan says. A fault of versions, not of the input."""


def calibrate_and_quantize(
    model: Any,
    modelopt_recipe: ModelOptRecipe,
    rows: npt.NDArray[np.int32],
    batch_size: int,
    progress: Callable[[int], None],
) -> None:
    """Inserts ModelOpt's quantizers and measures the input magnitudes of the FP8 modules on the rows.

    Only the decoder runs, so the logits (tokens x vocabulary) are never computed: no quantizer measures them.

    Args:
        model: The BF16 model; changed in place.
        modelopt_recipe: What to do.
        rows: Token ids [rows, tokens], int32.
        batch_size: Rows a forward pass.
        progress: Called with the rows of each pass.
    """
    import modelopt.torch.quantization as mtq
    import torch
    from modelopt.recipe import load_recipe

    def forward(calibrated: Any) -> None:
        with torch.inference_mode():
            for start in range(0, len(rows), batch_size):
                batch = torch.from_numpy(rows[start : start + batch_size]).long().to(calibrated.device)
                calibrated.model(input_ids=batch, use_cache=False)
                progress(len(batch))

    config = load_recipe(modelopt_recipe.name).quantize.model_dump()
    if experts.packs_in_batches(modelopt_recipe):
        config["quant_cfg"] = [*config["quant_cfg"], {"quantizer_name": "*.mlp.experts.*", "enable": False}]
    mtq.quantize(model, config, forward)


def check_coverage(model: Any, architecture: Architecture, listed: Mapping[str, str], modelopt_recipe: ModelOptRecipe) -> None:
    """Compares what ModelOpt quantized with what was planned, before anything is written.

    Args:
        model: After `calibrate_and_quantize`.
        architecture: Of the source.
        listed: Module -> scheme, a layer's experts by their container.
        modelopt_recipe: What was done.

    Raises:
        CoverageError: with every module that differs, or when the KV cache is not FP8.
    """
    from modelopt.torch.export.quant_utils import get_quant_config

    stated = get_quant_config(model)["quantization"]
    layers = stated.get("quantized_layers") or {}
    found = {checkpoint_name(name, architecture): entry["quant_algo"] for name, entry in layers.items()}
    if experts.packs_in_batches(modelopt_recipe):
        found |= experts.found(model, architecture)
    wrong = [
        f"{name}: {found.get(name, 'not quantized')}, planned {listed.get(name, 'not quantized')}"
        for name in sorted(found.keys() | listed.keys())
        if found.get(name) != listed.get(name)
    ]
    if wrong:
        shown = "\n  ".join(wrong[:20])
        raise CoverageError(
            f"ModelOpt quantized other modules than planned ({len(wrong)} differ); nothing was written.\n  {shown}"
        )
    if stated.get("kv_cache_quant_algo") != "FP8":
        raise CoverageError(
            f"ModelOpt set the KV cache to {stated.get('kv_cache_quant_algo')}, planned FP8; nothing was written."
        )


def export_modules(
    model: Any, architecture: Architecture, listed: Mapping[str, str], modelopt_recipe: ModelOptRecipe
) -> Iterator[dict[str, Any]]:
    """Packs each module and yields its tensors by checkpoint name: `weight` and its scales, on the model's device.

    Fused groups are unified first, as ModelOpt's exporter does: gate and up then share one `weight_scale_2`.
    A module's weight is released once the consumer asks for the next. Arguments as for `check_coverage`.
    """
    import torch
    from modelopt.torch.export.unified_export_hf import _export_quantized_weight, requantize_resmooth_fused_llm_layers

    with torch.inference_mode():
        requantize_resmooth_fused_llm_layers(model)
        for name, module in list(model.named_modules()):
            stored = checkpoint_name(name, architecture)
            if stored not in listed:
                continue
            if stored.endswith(experts.CONTAINER):
                yield from experts.export(stored, module, modelopt_recipe)
                continue
            _export_quantized_weight(module, torch.bfloat16)
            yield experts.tensors_of(stored, module)
            module.weight = None


def tensor_bytes(tensor: Any) -> memoryview:
    """A tensor's bytes, row-major, on the host."""
    import torch

    return memoryview(tensor.detach().contiguous().reshape(-1).cpu().view(torch.uint8).numpy())
