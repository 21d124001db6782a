"""The oracle: the documented way with ModelOpt's public functions alone, and the comparison of a run with it."""

import json
from pathlib import Path

import numpy as np

from assemble.checkpoint import Checkpoint
from quantize.runner import Outcome
from quantize.stage import Request

EXPERTS = 8  # of the tiny mixture, a layer


def modelopt_export(root: Path, rows: np.ndarray, recipe: str, device: str, out: Path) -> tuple[Checkpoint, dict]:
    """Exports with `mtq.quantize` and `export_hf_checkpoint`; returns the checkpoint and its hf_quant_config.json."""
    import modelopt.torch.quantization as mtq
    import torch
    from modelopt.recipe import load_recipe
    from modelopt.torch.export import export_hf_checkpoint
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    wrapped = not AutoConfig.from_pretrained(root).model_type.endswith("_text")
    auto = AutoModelForImageTextToText if wrapped else AutoModelForCausalLM
    model = auto.from_pretrained(root, dtype=torch.bfloat16).to(device).eval()

    def forward(model: torch.nn.Module) -> None:
        with torch.no_grad():
            for batch in torch.from_numpy(rows).long().to(device).split(16):
                model(input_ids=batch)

    mtq.quantize(model, load_recipe(recipe).quantize.model_dump(), forward)
    export_hf_checkpoint(model, export_dir=out)
    return Checkpoint.open(out), json.loads((out / "hf_quant_config.json").read_text())


def is_listed(tensor: str, listed: dict) -> bool:
    module = tensor.rpartition(".")[0]
    return module in listed or (
        not tensor.startswith("mtp.") and module.partition(".mlp.experts.")[0] + ".mlp.experts" in listed
    )


def compare_with_oracle(request: Request, outcome: Outcome, out: Path) -> None:
    """Quantized tensors equal ModelOpt's export byte for byte, every other tensor the source's, and there are no more."""
    made, source = Checkpoint.open(outcome.out), Checkpoint.open(Path(request.model))
    rows = np.load(request.workspace / "calibrate" / "rows.npy")
    family = made.config["model_type"].removesuffix("_text")
    recipe = request.recipe.recipe.modelopt[family]
    device = outcome.records["quantize"].facts["device"]
    oracle, oracle_config = modelopt_export(source.root, rows, recipe, device, out)
    listed = made.config["quantization_config"]["quantized_layers"]
    packed = [n for n in oracle if is_listed(n, listed)]
    kept = [n for n in source if not is_listed(n, listed)]
    containers = [module for module in listed if module.endswith(".mlp.experts")]
    assert len(packed) == 3 * (len(listed) - len(containers)) + 3 * 3 * EXPERTS * len(containers)
    assert made.keys() == set(packed) | set(kept)
    for names, origin in ((packed, oracle), (kept, source)):
        for name in names:
            assert (made[name].dtype, made[name].shape) == (origin[name].dtype, origin[name].shape), name
            assert made.read(name) == origin.read(name), name
    assert oracle_config["quantization"]["quantized_layers"] == listed
    assert oracle_config["quantization"]["kv_cache_quant_algo"] == "FP8"
