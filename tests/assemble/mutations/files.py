"""Faults of files: index, shards, headers, and the files beside the weights."""

import shutil

from assemble.checkpoint import INDEX
from tests.assemble.mutations.tools import (
    FIRST,
    SECOND,
    Table,
    head_in_a_file_of_its_own,
    overlap,
    symlink_out,
    unlink,
    write,
)

FILES: Table = {
    "no index": ("IDX-1", unlink(INDEX)),
    "index names an absent file": ("IDX-1", lambda c: c.index(lambda i: i["weight_map"].update(x="model-00003.safetensors"))),
    "a shard is lost": ("IDX-1", unlink(SECOND)),
    "a shard is not in the index": ("IDX-1", lambda c: shutil.copyfile(c.root / SECOND, c.root / "old.safetensors")),
    "the head's file is not in the index": ("IDX-1", lambda c: head_in_a_file_of_its_own(c, indexed=False)),
    "a shard is a link out of the folder": ("IDX-1", symlink_out),
    "no weights at all": ("IDX-1", unlink(FIRST, SECOND, INDEX)),
    "index is not JSON": ("IDX-2", write(INDEX, "{")),
    "index without weight_map": ("IDX-2", write(INDEX)),
    "index with a key twice": ("IDX-2", write(INDEX, '{"weight_map": {"a": "b", "a": "c"}}')),
    "weight_map maps to numbers": ("IDX-2", write(INDEX, '{"weight_map": {"a": 1}}')),
    "index leads out of the folder": ("IDX-2", lambda c: c.index(lambda i: i["weight_map"].update(x="../other.safetensors"))),
    "index places a tensor wrongly": ("IDX-2", lambda c: c.index(lambda i: i["weight_map"].update({"mtp.fc.weight": FIRST}))),
    "index lacks a tensor": ("IDX-2", lambda c: c.index(lambda i: i["weight_map"].pop("mtp.fc.weight"))),
    "index lists a tensor that is not stored": ("IDX-2", lambda c: c.index(lambda i: i["weight_map"].update(x=FIRST))),
    "a tensor is stored twice": ("IDX-2", lambda c: c.put("mtp.fc.weight", *c.get("mtp.fc.weight"), shard=FIRST)),
    "total_size is wrong": ("IDX-3", lambda c: c.index(lambda i: i["metadata"].update(total_size=1))),
    "no total_size": ("IDX-3", lambda c: c.index(lambda i: i.pop("metadata"))),
    "the head's shard is named otherwise": ("IDX-3", lambda c: head_in_a_file_of_its_own(c, indexed=True)),
    "a shard is cut off": ("IDX-4", lambda c: c.raw(SECOND, lambda d: d[:-100])),
    "a shard is cut inside its header": ("IDX-4", lambda c: c.raw(SECOND, lambda d: d[:100])),
    "a shard is empty": ("IDX-4", lambda c: c.raw(SECOND, lambda _: b"")),
    "a shard is too long": ("IDX-4", lambda c: c.raw(SECOND, lambda d: d + b"\0" * 16)),
    "a header's length is huge": ("IDX-4", lambda c: c.raw(SECOND, lambda d: b"\xff" * 8 + d[8:])),
    "a header is not JSON": ("IDX-4", lambda c: c.raw(SECOND, lambda d: d[:8] + b"\xff" + d[9:])),
    "tensors overlap": ("IDX-4", lambda c: c.header(FIRST, overlap)),
    "a hole between tensors": ("IDX-4", lambda c: c.header(SECOND, lambda h: h.pop("mtp.fc.weight"))),
    "a dtype that does not exist": ("IDX-4", lambda c: c.header(SECOND, lambda h: h["mtp.fc.weight"].update(dtype="BF17"))),
    "a shape that does not fill its bytes": (
        "IDX-4",
        lambda c: c.header(SECOND, lambda h: h["mtp.fc.weight"].update(shape=[2])),
    ),
    "consolidated weights": ("IDX-5", lambda c: shutil.copyfile(c.root / SECOND, c.root / "consolidated.safetensors")),
    "joint_head_config.json": ("IDX-5", write("joint_head_config.json")),
    "decision_config.json": ("IDX-5", write("decision_config.json")),
    "modules.json": ("IDX-5", write("modules.json", "[]")),
    "a second quantization config": ("IDX-5", write("old_hf_quant_config.json")),
    "no metadata": ("IDX-6", lambda c: c.header(FIRST, lambda h: h.pop("__metadata__"))),
    "metadata of another framework": ("IDX-6", lambda c: c.header(FIRST, lambda h: h.update(__metadata__={"format": "tf"}))),
}

SIDE: Table = {
    "no tokenizer": ("CFG-13", unlink("tokenizer.json")),
    "no tokenizer config": ("CFG-13", unlink("tokenizer_config.json")),
    "the tokenizer is cut off": ("CFG-13", write("tokenizer.json", '{"model": {"vocab')),
    "the tokenizer config is not JSON": ("CFG-13", write("tokenizer_config.json", "[")),
    "no generation config": ("CFG-13", unlink("generation_config.json")),
    "the generation config is not JSON": ("CFG-13", write("generation_config.json", "{]")),
    "a temperature below zero": ("CFG-13", write("generation_config.json", '{"temperature": -1}')),
    "no chat template": ("CFG-13", unlink("chat_template.jinja")),
    "half of the image processor": ("CFG-13", write("preprocessor_config.json")),
}
