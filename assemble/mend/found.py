"""Reads a checkpoint as it is found: every shard on the disk, whatever the index says, and every copy of a tensor."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assemble.checkpoint import INDEX, LINK_OUT, CheckpointError, Shard, TensorInfo, read_json, read_shard, stays_inside
from assemble.errors import InputError
from assemble.jsonfile import JSONFileError
from assemble.plan import natural

CONFIG = "config.json"
TWIN = "hf_quant_config.json"


@dataclass(frozen=True)
class Found:
    """What lies in a checkpoint's directory.

    Attributes:
        root: The directory.
        config: config.json; None where it is absent or cannot be parsed.
        twin: hf_quant_config.json, likewise.
        index: model.safetensors.index.json, likewise.
        broken: File name -> why it could not be read (JSON files and shards).
        shards: Every shard whose header could be read, in natural order.
        copies: Tensor name -> each place where it is stored.
    """

    root: Path
    config: Mapping[str, Any] | None
    twin: Mapping[str, Any] | None
    index: Mapping[str, Any] | None
    broken: Mapping[str, str]
    shards: tuple[Shard, ...]
    copies: Mapping[str, tuple[TensorInfo, ...]]

    @property
    def weight_map(self) -> dict[str, str]:
        """The index's `weight_map`, its malformed entries left out; empty without an index."""
        value = self.index.get("weight_map") if self.index else None
        return {n: f for n, f in value.items() if isinstance(f, str)} if isinstance(value, dict) else {}

    def path_of(self, tensor: TensorInfo) -> Path:
        """The file that holds the tensor."""
        return self._paths[tensor.shard]

    @functools.cached_property
    def _paths(self) -> dict[str, Path]:
        """Made once: a mixture of experts has 100,000 tensors."""
        return {shard.name: self.root / shard.name for shard in self.shards}


def read_found(root: Path) -> Found:
    """Reads the headers and the JSON files of a local checkpoint.

    Raises:
        InputError: no such directory, or no safetensors file in it.
    """
    if not root.is_dir():
        raise InputError(f"{root} is not a directory. Give the directory that holds config.json and the shards.")
    broken: dict[str, str] = {}
    config, twin, index = (_object(root, name, broken) for name in (CONFIG, TWIN, INDEX))
    shards, copies = [], dict[str, tuple[TensorInfo, ...]]()
    for name in sorted((p.name for p in root.glob("*.safetensors") if p.is_file()), key=natural):
        if not stays_inside(root / name):
            broken[name] = LINK_OUT
            continue
        try:
            shard = read_shard(root / name)
        except (CheckpointError, JSONFileError) as error:
            broken[name] = str(error)
            continue
        shards.append(shard)
        for tensor in shard.tensors:
            copies[tensor.name] = (*copies.get(tensor.name, ()), tensor)
    if not shards:
        raise InputError(f"{root} has no safetensors file that can be read, so there is nothing to mend.")
    return Found(root, config, twin, index, broken, tuple(shards), copies)


def _object(root: Path, name: str, broken: dict[str, str]) -> dict[str, Any] | None:
    try:
        return read_json(root, name)
    except JSONFileError as error:
        broken[name] = str(error)
        return None
