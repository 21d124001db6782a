"""Checkpoints of true shapes whose tensor data are holes: headers are real, no bytes are on the disk."""

import json
import shutil
from pathlib import Path
from typing import Any

from assemble.architecture import read_architecture
from assemble.checkpoint import INDEX
from assemble.formats import TensorSpec
from assemble.plan import file_order
from assemble.writer import _header

SIDE_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def dense_config(**text: Any) -> dict[str, Any]:
    """The config.json of a 27B dense model; `text` changes its text_config."""
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        "vision_config": {"model_type": "qwen3_5_vision", "out_hidden_size": 5120},
        "text_config": {
            "model_type": "qwen3_5_text", "dtype": "bfloat16", "hidden_size": 5120, "intermediate_size": 17408,
            "num_hidden_layers": 64, "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256,
            "linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4, "vocab_size": 248320, "full_attention_interval": 4, "mtp_num_hidden_layers": 1,
        } | text,
    }  # fmt: skip


def write_headers(root: Path, config: dict[str, Any], tokenizer: Path, shards: int = 11) -> Path:
    """Writes a BF16 checkpoint of the config's shapes into the new directory `root`, as sparse files."""
    root.mkdir(parents=True)
    architecture = read_architecture(config, ())
    shapes = architecture.body_tensors | architecture.mtp_tensors | {"model.visual.patch_embed.proj.bias": (1152,)}
    specs = sorted((TensorSpec(name, "BF16", shape) for name, shape in shapes.items()), key=file_order)
    weight_map = {}
    for i in range(shards):
        name, part = f"model-{i + 1:05d}-of-{shards:05d}.safetensors", specs[i::shards]
        header, _ = _header(part)
        with (root / name).open("wb") as file:
            file.write(header)
            file.truncate(len(header) + sum(t.nbytes for t in part))
        weight_map |= dict.fromkeys((t.name for t in part), name)
    index = {"metadata": {"total_size": sum(t.nbytes for t in specs)}, "weight_map": weight_map}
    (root / INDEX).write_text(json.dumps(index))
    (root / "config.json").write_text(json.dumps(config))
    for name in SIDE_FILES:
        shutil.copyfile(tokenizer / name, root / name)
    return root
