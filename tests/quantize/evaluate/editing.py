"""Breaks a checkpoint: a copy with some tensors changed."""

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]


def broken(root: Path, out: Path, change: Callable[[Tensors], None]) -> Path:
    """Copies the checkpoint to `out`, with `change` applied to a mapping of all its tensors; it may replace values only."""
    shutil.copytree(root, out)
    shards = {path: load_file(path) for path in sorted(out.glob("*.safetensors"))}
    tensors = {name: tensor for shard in shards.values() for name, tensor in shard.items()}
    change(tensors)
    for path, shard in shards.items():
        save_file({name: tensors[name].contiguous() for name in shard}, path, metadata={"format": "pt"})
    return out
