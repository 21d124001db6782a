"""The documented way with ModelOpt's public functions, the whole model in memory: what `benchmarks/whole_job.py` compares with.

python benchmarks/resident.py MODEL OUT --rows ROWS.npy --recipe NAME --batch 16 --device cpu
"""

import argparse
import json
import time
from pathlib import Path

import modelopt.torch.quantization as mtq
import numpy as np
import torch
from modelopt.recipe import load_recipe
from modelopt.torch.export import export_hf_checkpoint
from transformers import AutoModelForImageTextToText


def main() -> None:
    """Loads, calibrates, exports; prints the seconds of each as one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--recipe", required=True)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    seconds, started = {}, time.monotonic()
    model = AutoModelForImageTextToText.from_pretrained(arguments.model, dtype=torch.bfloat16).to(arguments.device).eval()
    seconds["load"] = time.monotonic() - started
    rows = torch.from_numpy(np.load(arguments.rows)).long().to(arguments.device)

    def forward(calibrated: torch.nn.Module) -> None:
        with torch.inference_mode():
            for batch in rows.split(arguments.batch):
                calibrated.model(input_ids=batch, use_cache=False)

    mtq.quantize(model, load_recipe(arguments.recipe).quantize.model_dump(), forward)
    seconds["calibrate"] = time.monotonic() - started - sum(seconds.values())
    with torch.inference_mode():
        export_hf_checkpoint(model, export_dir=arguments.out)
    seconds["export"] = time.monotonic() - started - sum(seconds.values())
    print(json.dumps({name: round(value, 1) for name, value in seconds.items()}))  # noqa: T201


if __name__ == "__main__":
    main()
