"""What the tables of faults are written with: names of the tiny model's modules, and small changes."""

import shutil
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.assemble.checkpoints import EXPERTS, Copy

Change = Callable[[Copy], Any]
Table = dict[str, tuple[str, Change]]
L = "model.language_model.layers"
MLP, GDN, ATT = f"{L}.1.mlp", f"{L}.0.linear_attn", f"{L}.3.self_attn"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
EXPERT = f"{L}.2.mlp.experts.5"
HEAD = "mtp.layers.0"
FP8 = {"quant_algo": "FP8"}
W4 = {"quant_algo": "W4A16_NVFP4", "group_size": 16}
CODES = bytes(range(1, 9))
EMBEDDING = "model.language_model.embed_tokens.weight"
BLOCKS = "lm_head.weight_scale"
ALL_EXPERTS = (EXPERTS, 256, 128)  # the shape of a fused down_proj
EVERY_EXPERT = bytes(2 * EXPERTS * 256 * 128)


def unlink(*names: str) -> Change:
    return lambda c: [(c.root / n).unlink() for n in names]


def write(name: str, text: str = "{}") -> Change:
    return lambda c: (c.root / name).write_text(text)


def head_in_a_file_of_its_own(c: Copy, *, indexed: bool) -> None:
    for name in c.names("mtp."):
        raw = c.get(name)
        c.drop(name)
        c.put(name, *raw, shard="mtp.safetensors")
    c.save()
    if not indexed:
        c.index(lambda i: i.update(weight_map={n: f for n, f in i["weight_map"].items() if f != "mtp.safetensors"}))


def text_only(c: Copy) -> None:
    """Qwen3_5ForCausalLM, as some tools export it: flat config, no tower."""
    c.drop(*c.names("model.visual."))

    def flat(config: dict[str, Any]) -> None:
        text, q = config.pop("text_config"), config["quantization_config"]
        config.clear()
        config.update({"architectures": ["Qwen3_5ForCausalLM"], "dtype": "bfloat16", **text, "quantization_config": q})

    c.config(flat)


def overlap(header: dict[str, Any]) -> None:
    first, second = [n for n in header if n != "__metadata__"][:2]
    size = header[second]["data_offsets"][1] - header[second]["data_offsets"][0]
    begin = header[first]["data_offsets"][0]
    header[second]["data_offsets"] = [begin, begin + size]


def symlink_out(c: Copy) -> None:
    outside = c.root.parent / "elsewhere.safetensors"
    shutil.copyfile(c.root / SECOND, outside)
    (c.root / SECOND).unlink()
    (c.root / SECOND).symlink_to(outside)


def fp8_stored(c: Copy, module: str) -> None:
    """A matrix stored as FP8 with its scales."""
    shape = c.source[f"{module}.weight"].shape
    c.put(f"{module}.weight", "F8_E4M3", shape, c.source.read(f"{module}.weight")[::2])
    c.scalar(f"{module}.weight_scale", 0.01)
    c.scalar(f"{module}.input_scale", 0.01)


def numbers(c: Copy, name: str) -> np.ndarray:
    return (np.frombuffer(c.get(name)[2], "<u2").astype(np.uint32) << 16).view(np.float32)


def shift(c: Copy, name: str, by: float) -> None:
    dtype, shape, _ = c.get(name)
    moved = (numbers(c, name) + np.float32(by)).astype(np.float32)
    c.put(name, dtype, shape, ((moved.view(np.uint32) + 0x8000) >> 16).astype("<u2").tobytes())


def same_tensor(c: Copy, source: str, target: str) -> None:
    c.put(target, *c.get(source))


def entry(module: str, value: Any) -> Change:
    return lambda c: c.layers(lambda q: q.update({module: value}))


def unlist(*modules: str) -> Change:
    return lambda c: c.layers(lambda q: [q.pop(m) for m in modules])


def put_nan(a: Any) -> None:
    a[8:10] = [0xC0, 0x7F]


def sparse_blocks(share: float) -> Callable[[Any], Any]:
    return lambda a: a.__setitem__(slice(0, int(a.size * share)), 0)


def flip(name: str, at: int = 0) -> Change:
    return lambda c: c.change(name, lambda a: a.__setitem__(at, a[at] ^ 1))
