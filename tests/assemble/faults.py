"""Faults that a repair mends, each one function that breaks an `Editable`. `SOURCE` ones need the BF16 source to be mended.

They are for the tiny dense checkpoint: layers 0 to 2 linear attention, layer 3 full attention, the second of two shards
unquantized.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from assemble.checkpoint import INDEX, Checkpoint
from tests.assemble.repairs import Editable

Break = Callable[[Editable, Checkpoint], None]
LAYER = "model.language_model.layers"
MLP = f"{LAYER}.1.mlp"
ATTENTION = f"{LAYER}.3.self_attn"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
NAN = np.float32(np.nan).tobytes()

CONFIG: dict[str, Break] = {
    "no twin": lambda e, s: setattr(e, "twin", None),
    "twin without quantization": lambda e, s: e.twin.pop("quantization"),
    "twin excludes less": lambda e, s: e.twin["quantization"]["exclude_modules"].pop(),
    "twin lists less": lambda e, s: e.twin["quantization"]["quantized_layers"].pop("lm_head"),
    "twin without KV": lambda e, s: e.twin["quantization"].pop("kv_cache_quant_algo"),
    "twin of other algo": lambda e, s: e.twin["quantization"].update(quant_algo="NVFP4"),
    "only the twin is quantized": lambda e, s: e.config.pop("quantization_config"),
    "no quant_method": lambda e, s: e.q.pop("quant_method"),
    "other quant_algo": lambda e, s: e.q.update(quant_algo="FP8"),
    "no producer": lambda e, s: e.q.pop("producer"),
    "no KV scheme": lambda e, s: e.q.pop("kv_cache_scheme"),
    "dynamic KV scheme": lambda e, s: e.q["kv_cache_scheme"].update(dynamic=True),
    "no ignore": lambda e, s: e.q.pop("ignore"),
    "no ignore at all": lambda e, s: (e.q.pop("ignore"), e.twin["quantization"].pop("exclude_modules")),
    "ignore is a string": lambda e, s: e.q.update(ignore="mtp*"),
    "ignore hits every MLP": lambda e, s: e.q["ignore"].append("*mlp*"),
    "ignore hits a layer": lambda e, s: e.q["ignore"].insert(0, f"{LAYER}.1"),
    "ignore hits one of a packed pair": lambda e, s: e.q["ignore"].append(f"{MLP}.gate_proj"),
    "ignore hits lm_head": lambda e, s: e.q["ignore"].append("lm_head"),
    "ignore names nothing": lambda e, s: e.q["ignore"].append("model.nowhere"),
    "ignore names nothing, under vLLM's names": lambda e, s: e.q["ignore"].append(
        "language_model.model.layers.0.linear_attn.conv1d"
    ),
    "ignore names a part of a group": lambda e, s: e.q["ignore"].remove(f"{LAYER}.0.linear_attn.in_proj_b"),
    "ignore without the head": lambda e, s: e.q.update(ignore=[i for i in e.q["ignore"] if "mtp" not in i]),
    "tied at the top": lambda e, s: e.config.update(tie_word_embeddings=True),
    "tied in the text config": lambda e, s: e.config["text_config"].update(tie_word_embeddings=True),
    "lists in_proj_a": lambda e, s: e.q["quantized_layers"].update({f"{LAYER}.0.linear_attn.in_proj_a": {"quant_algo": "FP8"}}),
    "lists the head": lambda e, s: e.q["quantized_layers"].update({"mtp.fc": {"quant_algo": "FP8"}}),
    "lists nothing that is": lambda e, s: e.q["quantized_layers"].update({"model.layers.9.x": {"quant_algo": "FP8"}}),
    "misses up_proj": lambda e, s: e.q["quantized_layers"].pop(f"{MLP}.up_proj"),
    "lists nothing": lambda e, s: e.q["quantized_layers"].clear(),
    "wrong algorithm": lambda e, s: e.q["quantized_layers"].update({f"{MLP}.down_proj": {"quant_algo": "FP8"}}),
    "wrong group_size": lambda e, s: e.q["quantized_layers"]["lm_head"].update(group_size=32),
    "groups miss a target": lambda e, s: e.q["config_groups"]["group_0"]["targets"].pop(),
    "head not declared": lambda e, s: e.config["text_config"].pop("mtp_num_hidden_layers"),
    "head declared empty": lambda e, s: e.config["text_config"].update(mtp_num_hidden_layers=0),
    "two head layers declared": lambda e, s: e.config["text_config"].update(mtp_num_hidden_layers=2),
    "no dtype": lambda e, s: e.config.pop("dtype"),
    "dtype float16": lambda e, s: e.config.update(dtype="float16"),
}


def _after_saving(e: Editable, s: Checkpoint) -> None:
    """What is done to the files themselves: see `AFTER`."""


AFTER: dict[str, Callable[[Editable], None]] = {
    "index is not JSON": lambda e: (e.root / INDEX).write_text("{"),
    "shard cut off": lambda e: (e.root / SECOND).write_bytes((e.root / SECOND).read_bytes()[:-100]),
    "shard lost": lambda e: (e.root / SECOND).unlink(),
    "config is not JSON": lambda e: (e.root / "config.json").write_text("{"),
    "config lost": lambda e: (e.root / "config.json").unlink(),
}


def _numbered(e: Editable, first: str, second: str) -> None:
    e.shards = {first: e.shards[FIRST], second: e.shards[SECOND]}
    if e.index is not None:
        renamed = {FIRST: first, SECOND: second}
        e.index["weight_map"] = {n: renamed[f] for n, f in e.index["weight_map"].items()}


def _unindexed_head(e: Editable, s: Checkpoint) -> None:
    e.shards["mtp.safetensors"] = {n: e.drop(n) for n in s if n.startswith("mtp.")}


def _orphan_amax(e: Editable, s: Checkpoint) -> None:
    e.shards[FIRST][f"{MLP}.gate_proj.weight_quantizer._amax"] = ("F32", (), np.float32(1).tobytes())


def _renamed_head(e: Editable, s: Checkpoint) -> None:
    for name in [n for n in e.shards[SECOND] if n.startswith("mtp.")]:
        e.put(f"model.{name}", e.drop(name))


def _bf16_lm_head(e: Editable, s: Checkpoint) -> None:
    """As ModelOpt's low-memory path leaves it: listed in both files, BF16, without scales."""
    _bf16(e, s, "lm_head")


def _bf16(e: Editable, s: Checkpoint, *modules: str) -> None:
    for module in modules:
        for leaf in ("weight_scale", "weight_scale_2"):
            if f"{module}.{leaf}" in e.shards[FIRST]:
                e.drop(f"{module}.{leaf}")
        t = s[f"{module}.weight"]
        e.put(t.name, (t.dtype, t.shape, s.read(t.name)))


FILES: dict[str, Break] = {
    "no index": lambda e, s: setattr(e, "index", None),
    "index misses tensors": lambda e, s: [e.index["weight_map"].pop(n) for n in list(e.shards[SECOND])[:3]],
    "index names absent tensors": lambda e, s: e.index["weight_map"].update({"model.x.weight": FIRST}),
    "index names an absent file": lambda e, s: e.index["weight_map"].update(
        {"model.x.weight": "model-00003-of-00003.safetensors"}
    ),
    "index swaps the files": lambda e, s: e.index["weight_map"].update(dict.fromkeys(e.shards[FIRST], SECOND)),
    "index is empty": lambda e, s: e.index.update(weight_map={}),
    "total_size wrong": lambda e, s: setattr(e, "total_size", 12345),
    "no metadata": lambda e, s: e.metadata.update({SECOND: {}}),
    "metadata of another format": lambda e, s: e.metadata.update({FIRST: {"format": "np"}}),
    "shards numbered from 0": lambda e, s: _numbered(e, "model-00000-of-00002.safetensors", "model-00001-of-00002.safetensors"),
    "shards of 3": lambda e, s: _numbered(e, "model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"),
    "head never indexed": _unindexed_head,
    "orphan amax": _orphan_amax,
    "quantizer state in the index": lambda e, s: e.put("lm_head.input_quantizer._amax", ("F32", (), NAN)),
    "tensor stored twice alike": lambda e, s: e.shards[FIRST].update({"mtp.norm.weight": e.get("mtp.norm.weight")}),
    "body tensor stored twice alike": lambda e, s: e.shards[SECOND].update({"lm_head.weight": e.get("lm_head.weight")}),
    "stale BF16 copy of a packed weight": lambda e, s: e.shards[SECOND].update(
        {"lm_head.weight": ("BF16", s["lm_head.weight"].shape, s.read("lm_head.weight"))}
    ),
    "head under model.": _renamed_head,
    "lm_head under model.": lambda e, s: e.put("model.lm_head.weight", e.drop("lm_head.weight"), FIRST),
    "consolidated copy": lambda e, s: e.shards.update({"consolidated.safetensors": dict(list(e.shards[SECOND].items())[:2])}),
    "modules.json": lambda e, s: (e.root / "modules.json").write_text("[]"),
    "second quant config": lambda e, s: (e.root / "old_hf_quant_config.json").write_text("{}"),
    "index is not JSON": _after_saving,
    "listed lm_head stored BF16": _bf16_lm_head,
    "listed gate stored BF16": lambda e, s: _bf16(e, s, f"{MLP}.gate_proj"),
    "unlisted gate stored BF16 beside a packed up": lambda e, s: (
        _bf16(e, s, f"{MLP}.gate_proj"),
        e.q["quantized_layers"].pop(f"{MLP}.gate_proj"),
        e.twin["quantization"]["quantized_layers"].pop(f"{MLP}.gate_proj"),
    ),
    "listed pair stored BF16": lambda e, s: _bf16(e, s, f"{MLP}.gate_proj", f"{MLP}.up_proj"),
    "listed FP8 stored BF16": lambda e, s: _bf16(e, s, f"{ATTENTION}.o_proj"),
    "listed q stored BF16, no input scale": lambda e, s: (
        _bf16(e, s, f"{ATTENTION}.q_proj"),
        e.drop(f"{ATTENTION}.q_proj.input_scale"),
    ),
    "tensor scale of gate lost": lambda e, s: e.drop(f"{MLP}.gate_proj.weight_scale_2"),
    "tensor scale of up NaN": lambda e, s: e.put(f"{MLP}.up_proj.weight_scale_2", ("F32", (), NAN)),
    "input scale of k lost": lambda e, s: e.drop(f"{ATTENTION}.k_proj.input_scale"),
    "input scale on a weight-only module": lambda e, s: e.put("lm_head.input_scale", ("F32", (), np.float32(1).tobytes())),
    "scale beside a BF16 weight": lambda e, s: e.put(f"{LAYER}.0.linear_attn.in_proj_a.weight_scale", ("F32", (), NAN)),
}


def _flip(e: Editable, name: str) -> None:
    dtype, shape, data = e.get(name)
    e.put(name, (dtype, shape, bytes([data[0] ^ 1]) + data[1:]))


def _byte(e: Editable, name: str, value: int) -> None:
    dtype, shape, data = e.get(name)
    e.put(name, (dtype, shape, bytes([value]) + data[1:]))


def _float32(e: Editable, name: str) -> None:
    _, shape, data = e.get(name)
    e.put(name, ("F32", shape, (np.frombuffer(data, "<u2").astype(np.uint32) << 16).tobytes()))


def _quantized_head(e: Editable, s: Checkpoint) -> None:
    _, (rows, columns), _ = e.get("mtp.fc.weight")
    e.put("mtp.fc.weight", ("U8", (rows, columns // 2), bytes(rows * columns // 2)))
    e.put("mtp.fc.weight_scale", ("F8_E4M3", (rows, columns // 16), bytes([56]) * (rows * columns // 16)))
    e.put("mtp.fc.weight_scale_2", ("F32", (), np.float32(1).tobytes()))
    e.q["quantized_layers"]["mtp.fc"] = {"quant_algo": "W4A16_NVFP4", "group_size": 16}


def _own_scales(e: Editable, s: Checkpoint) -> None:
    """Gate and up as an exporter leaves them that does not unify their scales."""
    from assemble import nvfp4

    for module in (f"{MLP}.gate_proj", f"{MLP}.up_proj"):
        rows, columns = s[f"{module}.weight"].shape
        values = nvfp4.from_bf16(s.read(f"{module}.weight"), columns)
        scale = nvfp4.tensor_scale(nvfp4.amax([values]))
        if module.endswith("up_proj"):
            scale = np.float32(scale * 1.37)
        packed = nvfp4.quantize_rows(values, scale)
        e.put(f"{module}.weight", ("U8", (rows, columns // 2), packed.weight.tobytes()))
        e.put(f"{module}.weight_scale", ("F8_E4M3", (rows, columns // 16), packed.weight_scale.tobytes()))
        e.put(f"{module}.weight_scale_2", ("F32", (), scale.tobytes()))


def _side(*names: str) -> Break:
    return lambda e, s: [(e.root / n).unlink() for n in names]


SOURCE: dict[str, Break] = {
    "tokenizer lost": _side("tokenizer.json", "tokenizer_config.json"),
    "template lost": _side("chat_template.jinja", "generation_config.json"),
    "norm changed": lambda e, s: _flip(e, f"{LAYER}.2.input_layernorm.weight"),
    "embedding changed": lambda e, s: _flip(e, "model.language_model.embed_tokens.weight"),
    "A_log cast": lambda e, s: _float32(e, f"{LAYER}.0.linear_attn.A_log"),
    "vision tensor changed": lambda e, s: _flip(e, next(n for n in e.shards[SECOND] if n.startswith("model.visual."))),
    "norm lost": lambda e, s: e.drop("model.language_model.norm.weight"),
    "vision tensor lost": lambda e, s: e.drop(next(n for n in e.shards[SECOND] if n.startswith("model.visual."))),
    "router-like matrix packed": lambda e, s: e.put(
        f"{LAYER}.0.linear_attn.in_proj_a.weight", ("F8_E4M3", (4, 256), bytes(1024))
    ),
    "head lost": lambda e, s: [e.drop(n) for n in s if n.startswith("mtp.")],
    "head partial": lambda e, s: e.drop("mtp.layers.0.self_attn.q_proj.weight"),
    "head changed": lambda e, s: _flip(e, "mtp.layers.0.mlp.up_proj.weight"),
    "head cast": lambda e, s: _float32(e, "mtp.fc.weight"),
    "head quantized": _quantized_head,
    "head has a part too many": lambda e, s: e.put("mtp.lm_head.weight", e.get("mtp.norm.weight")),
    "gate and up of different scales": _own_scales,
    "block scales lost": lambda e, s: e.drop(f"{MLP}.down_proj.weight_scale"),
    "packed weight lost": lambda e, s: e.drop("lm_head.weight"),
    "packed module lost": lambda e, s: [e.drop(f"{MLP}.up_proj.{n}") for n in ("weight", "weight_scale", "weight_scale_2")],
    "tensor scale of down lost": lambda e, s: e.drop(f"{MLP}.down_proj.weight_scale_2"),
    "FP8 scale NaN": lambda e, s: e.put(f"{ATTENTION}.v_proj.weight_scale", ("F32", (), NAN)),
    "FP8 weight lost": lambda e, s: e.drop(f"{ATTENTION}.k_proj.weight"),
    "block scale NaN": lambda e, s: _byte(e, f"{MLP}.up_proj.weight_scale", 0x7F),
    "packed weight all zeros": lambda e, s: e.put("lm_head.weight", (*e.get("lm_head.weight")[:2], bytes(2048 * 128))),
    "packed weight of another module": lambda e, s: e.put(f"{MLP}.up_proj.weight", e.get(f"{MLP}.gate_proj.weight")),
    "FP8 weight of another module": lambda e, s: e.put(f"{ATTENTION}.k_proj.weight", e.get(f"{ATTENTION}.v_proj.weight")),
    "tensor scale ten times too large": lambda e, s: e.put(
        f"{MLP}.down_proj.weight_scale_2", ("F32", (), np.float32(1).tobytes())
    ),
    "vision tensor that the source has not": lambda e, s: e.put("model.visual.extra.weight", ("BF16", (2,), bytes(4))),
    "norm stored twice, different": lambda e, s: e.shards[FIRST].update(
        {f"{LAYER}.2.input_layernorm.weight": ("BF16", (256,), bytes(512))}
    ),
    "packed weight stored twice, different": lambda e, s: e.shards[SECOND].update(
        {
            f"{MLP}.down_proj.weight": (
                "U8",
                e.get(f"{MLP}.down_proj.weight")[1],
                bytes(len(e.get(f"{MLP}.down_proj.weight")[2])),
            )
        }
    ),
    "config field changed": lambda e, s: e.config["text_config"].update(rms_norm_eps=1e-5),
    "config field lost": lambda e, s: e.config["vision_config"].pop("depth"),
    "architecture changed": lambda e, s: e.config.update(architectures=["Qwen3_5ForCausalLM"]),
    "shard cut off": _after_saving,
    "shard lost": _after_saving,
    "config is not JSON": _after_saving,
    "config lost": _after_saving,
}
UNMENDABLE: dict[str, Break] = {
    "norm stored twice, different": SOURCE["norm stored twice, different"],
    "head lost": SOURCE["head lost"],
    "head quantized": SOURCE["head quantized"],
    "norm lost": SOURCE["norm lost"],
    "block scales lost": SOURCE["block scales lost"],
    "tokenizer lost": SOURCE["tokenizer lost"],
    "input scale of o_proj lost": lambda e, s: e.drop(f"{ATTENTION}.o_proj.input_scale"),
    "shard cut off": _after_saving,
}


def break_it(root: Path, fault: str, table: dict[str, Break], source: Checkpoint) -> None:
    """Puts one fault into the checkpoint at `root`."""
    edited = Editable.open(root)
    table[fault](edited, source)
    edited.save()
    if fault in AFTER:
        AFTER[fault](edited)
