"""Writes variants of the tiny models: other shards, other places of the head, text only, F32 parts, split experts."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from quantize import demo

SIDE_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


@dataclass(frozen=True)
class Variant:
    """How a variant differs from a tiny model.

    Attributes:
        shards: Shards of the body.
        head: Where the MTP head lies: `first`, `last`, `own` (a shard of its own) or `none`.
        float32: Store A_log, dt_bias and the norms in F32, as some published checkpoints do.
        text_only: `Qwen3_5ForCausalLM`: flat config, no vision tower.
        keep_prefix: For a text-only variant: keep `model.language_model.` in the names.
        moe: Start from the mixture of experts.
        split: Store its experts one by one, in the decoder and in the head.
        starved: Give its routers weights that never choose experts 2 to 7.
    """

    shards: int = 2
    head: str = "last"
    float32: bool = False
    text_only: bool = False
    keep_prefix: bool = False
    moe: bool = False
    split: bool = False
    starved: bool = False


def write_variant(root: Path, variant: Variant) -> Path:
    """Writes the variant into the new directory `root` and returns it."""
    tiny = demo.MOE_MODEL if variant.moe else demo.MODEL
    root.mkdir(parents=True)
    for name in SIDE_FILES:
        shutil.copyfile(tiny / name, root / name)
    tensors: dict[str, torch.Tensor] = {}
    for shard in sorted(tiny.glob("*.safetensors")):
        tensors |= load_file(shard)
    config = json.loads((tiny / "config.json").read_text())
    if variant.text_only:
        config, tensors = _text_only(config, tensors, keep_prefix=variant.keep_prefix)
    if variant.starved:
        tensors = {n: _starved(t) if n.endswith("mlp.gate.weight") else t for n, t in tensors.items()}
    if variant.split:
        tensors = {name: part for n, t in tensors.items() for name, part in _split(n, t)}
    if variant.float32:
        tensors = {n: t.float() if _wants_float32(n) else t for n, t in tensors.items()}
    (root / "config.json").write_text(json.dumps(config, indent=2))
    _save(root, tensors, variant)
    return root


def _wants_float32(name: str) -> bool:
    return not name.startswith("mtp.") and name.endswith(("A_log", "dt_bias", "norm.weight", "layernorm.weight"))


def _starved(router: torch.Tensor) -> torch.Tensor:
    """A router whose experts 2 and on have the logit 0, and whose first two have one above and one below: top 2 of 8.

    One of the first two always wins; of the six that tie at 0, one is chosen, so most experts see no token.
    """
    starved = torch.zeros_like(router)
    starved[0], starved[1] = router[0], -router[0]
    return starved


def _split(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    container, _, leaf = name.rpartition(".")
    if not container.endswith(".mlp.experts"):
        yield name, tensor
        return
    for e, expert in enumerate(tensor):
        if leaf == "down_proj":
            yield f"{container}.{e}.down_proj.weight", expert
        else:
            gate, up = expert.chunk(2)
            yield f"{container}.{e}.gate_proj.weight", gate
            yield f"{container}.{e}.up_proj.weight", up


def _text_only(config: dict, tensors: dict[str, torch.Tensor], *, keep_prefix: bool) -> tuple[dict, dict[str, torch.Tensor]]:
    name = config["architectures"][0].replace("ForConditionalGeneration", "ForCausalLM")
    flat = {"architectures": [name], "dtype": "bfloat16", **config["text_config"]}
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
