"""The decoder, a layer at a time, gives what transformers' whole model gives, bit for bit."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from assemble.architecture import TEXT_CLASS, WRAPPED_CLASS, read_architecture
from assemble.checkpoint import Checkpoint
from quantize.streaming.decoder import Decoder
from quantize.streaming.reading import read_layer, read_tensor


def resident(root: Path, ids: torch.Tensor, experts: str | None = None) -> torch.Tensor:
    """The hidden states of transformers' own model."""
    checkpoint = Checkpoint.open(root)
    architecture = read_architecture(checkpoint.config, checkpoint)
    classes = WRAPPED_CLASS if architecture.wrapped else TEXT_CLASS
    model_class = getattr(transformers, classes[architecture.model_type])
    options = {"experts_implementation": experts} if experts else {}
    model = model_class.from_pretrained(root, dtype=torch.bfloat16, **options).eval()
    with torch.inference_mode():
        return model.model(input_ids=ids, use_cache=False).last_hidden_state


def streamed(root: Path, ids: torch.Tensor) -> torch.Tensor:
    checkpoint = Checkpoint.open(root)
    architecture = read_architecture(checkpoint.config, checkpoint)
    decoder = Decoder(architecture, "cpu")
    hidden = decoder.embed(read_tensor(checkpoint, f"{architecture.prefix}embed_tokens.weight"), ids)
    for i in range(decoder.num_layers):
        hidden = decoder.forward(decoder.layer(i, read_layer(checkpoint, architecture, i)), hidden)
    return decoder.final_norm(read_tensor(checkpoint, f"{architecture.prefix}norm.weight"), hidden)


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).integers(0, 2048, (3, 70)))


def test_dense(tiny: Path, ids: torch.Tensor) -> None:
    assert torch.equal(streamed(tiny, ids), resident(tiny, ids))


def test_mixture_equals_the_loop_over_experts(tiny_moe: Path, ids: torch.Tensor) -> None:
    assert torch.equal(streamed(tiny_moe, ids), resident(tiny_moe, ids, "eager"))


@pytest.mark.parametrize(
    "options", [{"moe": True, "split": True}, {"text_only": True}, {"moe": True, "text_only": True}], ids=str
)
def test_variants(options: dict, make_variant, ids: torch.Tensor) -> None:  # type: ignore[no-untyped-def]
    root = make_variant(**options)
    assert torch.equal(streamed(root, ids), resident(root, ids, "eager" if options.get("moe") else None))


def test_two_batch_shapes_in_turn(tiny: Path, ids: torch.Tensor) -> None:
    checkpoint = Checkpoint.open(tiny)
    architecture = read_architecture(checkpoint.config, checkpoint)
    decoder = Decoder(architecture, "cpu")
    module = decoder.layer(3, read_layer(checkpoint, architecture, 3))  # full attention: the mask depends on the shape
    states = decoder.embed(read_tensor(checkpoint, f"{architecture.prefix}embed_tokens.weight"), ids)
    whole = decoder.forward(module, states)
    assert torch.allclose(decoder.forward(module, states[:1, :33]).float(), whole[:1, :33].float(), atol=0.02)
    assert torch.equal(decoder.forward(module, states), whole)


def test_a_layer_without_a_tensor_is_refused(tiny: Path) -> None:
    checkpoint = Checkpoint.open(tiny)
    architecture = read_architecture(checkpoint.config, checkpoint)
    tensors = read_layer(checkpoint, architecture, 0)
    del tensors["mlp.down_proj.weight"]
    with pytest.raises(RuntimeError, match=r"mlp\.down_proj\.weight"):
        Decoder(architecture, "cpu").layer(0, tensors)


def test_a_shard_that_ends_too_early(make_variant) -> None:  # type: ignore[no-untyped-def]
    root = make_variant(shards=1)
    checkpoint = Checkpoint.open(root)
    architecture = read_architecture(checkpoint.config, checkpoint)
    shard = next(root.glob("*.safetensors"))
    with shard.open("r+b") as file:
        file.truncate(shard.stat().st_size // 2)
    last = max(
        range(architecture.num_layers), key=lambda i: checkpoint[f"{architecture.prefix}layers.{i}.mlp.up_proj.weight"].start
    )
    with pytest.raises(OSError, match="ends too early"):
        read_layer(checkpoint, architecture, last)
