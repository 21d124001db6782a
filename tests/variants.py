"""Writes variants of the tiny model: other shards, other places of the head, text only, F32 parts."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

SIDE_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


@dataclass(frozen=True)
class Variant:
    """How a variant differs from the tiny model.

    Attributes:
        shards: Shards of the body.
        head: Where the MTP head lies: `first`, `last`, `own` (a shard of its own) or `none`.
        float32: Store A_log, dt_bias and the norms in F32, as some published checkpoints do.
        text_only: `Qwen3_5ForCausalLM`: flat config, no vision tower.
        keep_prefix: For a text-only variant: keep `model.language_model.` in the names.
    """

    shards: int = 2
    head: str = "last"
    float32: bool = False
    text_only: bool = False
    keep_prefix: bool = False


def write_variant(tiny: Path, root: Path, variant: Variant) -> Path:
    """Writes the variant into the new directory `root` and returns it."""
    root.mkdir(parents=True)
    for name in SIDE_FILES:
        shutil.copyfile(tiny / name, root / name)
    tensors: dict[str, torch.Tensor] = {}
    for shard in sorted(tiny.glob("*.safetensors")):
        tensors |= load_file(shard)
    config = json.loads((tiny / "config.json").read_text())
    if variant.text_only:
        config, tensors = _text_only(config, tensors, keep_prefix=variant.keep_prefix)
    if variant.float32:
        tensors = {n: t.float() if _wants_float32(n) else t for n, t in tensors.items()}
    (root / "config.json").write_text(json.dumps(config, indent=2))
    _save(root, tensors, variant)
    return root


def _wants_float32(name: str) -> bool:
    return not name.startswith("mtp.") and name.endswith(("A_log", "dt_bias", "norm.weight", "layernorm.weight"))


def _text_only(config: dict, tensors: dict[str, torch.Tensor], *, keep_prefix: bool) -> tuple[dict, dict[str, torch.Tensor]]:
    flat = {"architectures": ["Qwen3_5ForCausalLM"], "dtype": "bfloat16", **config["text_config"]}
    kept = {n: t for n, t in tensors.items() if not n.startswith("model.visual.")}
    if not keep_prefix:
        kept = {n.replace("model.language_model.", "model."): t for n, t in kept.items()}
    return flat, kept


def _save(root: Path, tensors: dict[str, torch.Tensor], variant: Variant) -> None:
    head = {n: t for n, t in tensors.items() if n.startswith("mtp.")}
    body = sorted(n for n in tensors if n not in head)
    step = -(-len(body) // variant.shards)
    parts = [{n: tensors[n] for n in body[i : i + step]} for i in range(0, len(body), step)]
    if variant.head == "own":
        parts.append(head)
    elif variant.head != "none":
        parts[0 if variant.head == "first" else -1] |= head
    weight_map = {}
    for i, part in enumerate(parts, 1):
        name = f"model-{i:05d}-of-{len(parts):05d}.safetensors"
        save_file({n: t.contiguous() for n, t in part.items()}, root / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    total = sum(t.nbytes for part in parts for t in part.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (root / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
