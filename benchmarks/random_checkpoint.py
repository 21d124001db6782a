"""Writes a random BF16 checkpoint with a real model's shapes, to measure on.

    python benchmarks/random_checkpoint.py OUT --shape 9b
    python benchmarks/random_checkpoint.py OUT --shape 35b-a3b --layers 4

Its weights are normal with a standard deviation of 0.02; it has the tiny model's tokenizer, so it can be calibrated.
"""

import argparse
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration, Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration

from assemble.architecture import read_architecture
from assemble.checkpoint import INDEX
from assemble.formats import TensorSpec
from assemble.plan import file_order
from assemble.writer import ShardWriter
from quantize import demo

SHAPES: dict[str, dict[str, int]] = {
    "0.3b": {"hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 8, "num_attention_heads": 8,
             "num_key_value_heads": 2, "linear_num_value_heads": 16, "vocab_size": 65536},
    "1b": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 16, "num_attention_heads": 8,
           "num_key_value_heads": 2, "linear_num_value_heads": 32, "vocab_size": 32768},
    "9b": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32, "num_attention_heads": 16,
           "num_key_value_heads": 4, "linear_num_value_heads": 32, "vocab_size": 248320},
    "27b": {"hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64, "num_attention_heads": 24,
            "num_key_value_heads": 4, "linear_num_value_heads": 48, "vocab_size": 248320},
    "35b-a3b": {"hidden_size": 2048, "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
                "shared_expert_intermediate_size": 512, "num_hidden_layers": 40, "num_attention_heads": 16,
                "num_key_value_heads": 2, "linear_num_value_heads": 32, "vocab_size": 248320},
}  # fmt: skip
SHARD_BYTES = 5_000_000_000


def config(shape: str, layers: int | None) -> Any:
    """The configuration of a shape, with another number of layers when given."""
    text = SHAPES[shape] | {
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    }
    text |= {"num_hidden_layers": layers} if layers else {}
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    text |= {"mtp_num_hidden_layers": 1, "rope_parameters": rope | {"mrope_section": [11, 11, 10], "mrope_interleaved": True}}
    family = Qwen3_5MoeConfig if "num_experts" in text else Qwen3_5Config
    return family(text_config=text, vision_config={"out_hidden_size": text["hidden_size"]}, tie_word_embeddings=False)


def write(out: Path, shape: str, layers: int | None, device: str) -> None:
    """Writes the checkpoint."""
    out.mkdir(parents=True)
    made = config(shape, layers)
    model_class = Qwen3_5MoeForConditionalGeneration if "num_experts" in SHAPES[shape] else Qwen3_5ForConditionalGeneration
    with torch.device("meta"):
        model = model_class(made)
    settings: dict[str, Any] = made.to_dict() | {"architectures": [model_class.__name__], "dtype": "bfloat16"}
    settings["text_config"] = {key: value for key, value in settings["text_config"].items() if value is not None}
    shapes = {name: tuple(t.shape) for name, t in model.state_dict().items()} | read_architecture(settings, ()).mtp_tensors
    specs = sorted((TensorSpec(name, "BF16", shape) for name, shape in shapes.items()), key=file_order)
    parts: list[list[TensorSpec]] = [[]]
    for spec in specs:
        if sum(t.nbytes for t in parts[-1]) + spec.nbytes > SHARD_BYTES and parts[-1]:
            parts.append([])
        parts[-1].append(spec)
    names = [f"model-{i:05d}-of-{len(parts):05d}.safetensors" for i in range(1, len(parts) + 1)]
    weight_map = {t.name: name for name, part in zip(names, parts, strict=True) for t in part}

    def fill(number: int) -> None:
        generator = torch.Generator(device).manual_seed(number)
        with ShardWriter(out / names[number], parts[number]) as writer:
            for t in parts[number]:
                values = torch.randn(t.shape, generator=generator, device=device, dtype=torch.bfloat16).mul_(0.02)
                writer.write(t.name, memoryview(values.cpu().reshape(-1).view(torch.uint8).numpy()))

    with ThreadPoolExecutor() as pool:
        list(pool.map(fill, range(len(parts))))
    index = {"metadata": {"total_size": sum(t.nbytes for t in specs)}, "weight_map": weight_map}
    (out / INDEX).write_text(json.dumps(index))
    (out / "config.json").write_text(json.dumps(settings, indent=2))
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copyfile(demo.MODEL / file, out / file)


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="9b")
    parser.add_argument("--layers", type=int, help="decoder layers, in place of the shape's own")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    write(arguments.out, arguments.shape, arguments.layers, arguments.device)


if __name__ == "__main__":
    main()
