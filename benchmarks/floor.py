# ruff: noqa: E402 - what takes seconds to import is imported first, as a run does it
"""What no quantizer can go below on this machine: reading, running, packing and writing, each measured by itself.

    python benchmarks/floor.py MODEL OUT --rows ROWS.npy --device cuda

Reads every tensor that is quantized to the device, runs the decoder on the rows, packs every weight, and writes as many bytes
as the result has, with fsync. The three lanes (disk to device, computing, device to disk) can overlap, so the floor is the
longest of them. A process that does it must also start: `start` is the time from its beginning until PyTorch and transformers
are imported and the GPU is ready, `process` that and the floor. Prints one JSON object.
"""

import argparse
import json
import os
import time
from pathlib import Path

import psutil

from quantize import libraries

libraries.start_gpu()
libraries.start_importing(gpu=True)
libraries.wait_until_imported()

import numpy as np
import torch

from assemble.checkpoint import Checkpoint
from assemble.formats import FP8
from assemble.plan import AssemblyPlan
from quantize.planning import build_plan
from quantize.streaming.activations import Activations, Store
from quantize.streaming.calibration import Calibration
from quantize.streaming.decoder import Decoder
from quantize.streaming.modules import Packer
from quantize.streaming.ranks import Ranks
from quantize.streaming.reading import Reader, layer_group, tensor_group
from recipes import loader


def read(plan: AssemblyPlan, device: torch.device) -> float:
    """Seconds to read all quantized modules' layers and lm_head."""
    started = time.monotonic()
    with Reader(plan.source, device) as reader:
        reader.read(tensor_group(plan.source, "lm_head.weight"))
        for i in range(plan.architecture.num_layers):
            reader.read(layer_group(plan.source, plan.architecture, i))
    return time.monotonic() - started


def compute(plan: AssemblyPlan, device: torch.device, rows: np.ndarray, batch: int) -> dict[str, float]:
    """Seconds of the forward pass and of packing; reading is not counted."""
    seconds = {"forward": 0.0, "pack": 0.0}
    decoder = Decoder(plan.architecture, str(device))
    store = Store.DEVICE if device.type == "cuda" else Store.HOST
    states = Activations((*rows.shape, decoder.hidden_size), batch, device, store, Path())
    states.embed(decoder, plan.source, f"{plan.architecture.prefix}embed_tokens.weight", rows)
    calibration = Calibration(decoder, states, Ranks())
    packer = Packer(plan.architecture, plan.schemes, "max", lambda _: True)
    with Reader(plan.source, device) as reader:
        for layer in (None, *range(plan.architecture.num_layers)):
            prefix = "" if layer is None else f"{plan.architecture.prefix}layers.{layer}."
            head = layer is None
            group = tensor_group(plan.source, "lm_head.weight") if head else layer_group(plan.source, plan.architecture, layer)
            tensors = reader.read(group)
            synchronize(device)
            started = time.monotonic()
            if layer is not None:
                last = layer == plan.architecture.num_layers - 1
                measured = {m.removeprefix(prefix) for m, s in plan.schemes.items() if s == FP8 and m.startswith(prefix)}
                calibration.run(layer, tensors, measured if last else set(), last=last)
                synchronize(device)
                seconds["forward"] += time.monotonic() - started
                started = time.monotonic()
            for _ in packer.pack(prefix, tensors, dict.fromkeys(plan.schemes, torch.ones(()))):
                pass
            synchronize(device)
            seconds["pack"] += time.monotonic() - started
    return seconds


def write(nbytes: int, path: Path) -> float:
    """Seconds to write so many bytes in one file."""
    block = os.urandom(1 << 26)
    started = time.monotonic()
    with path.open("wb", buffering=0) as file:
        for offset in range(0, nbytes, len(block)):
            file.write(block[: nbytes - offset])
        os.fsync(file.fileno())
    seconds = time.monotonic() - started
    path.unlink()
    return seconds


def synchronize(device: torch.device) -> None:
    """Waits for the GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    torch.zeros(1, device=device)
    start = time.time() - psutil.Process().create_time()
    source = Checkpoint.open(arguments.model)
    plan = build_plan(loader.load(loader.DEFAULT).recipe, source, source)
    seconds = {"start": start, "read": read(plan, device), **compute(plan, device, np.load(arguments.rows), arguments.batch)}
    arguments.out.mkdir(parents=True, exist_ok=True)
    seconds["write"] = write(plan.nbytes, arguments.out / "floor.bin")
    seconds["floor"] = max(seconds["read"], seconds["forward"] + seconds["pack"], seconds["write"])
    seconds["process"] = start + seconds["floor"]
    print(json.dumps({name: round(value, 2) for name, value in seconds.items()}))  # noqa: T201


if __name__ == "__main__":
    main()
