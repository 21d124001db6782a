"""A checkpoint read back: the right tensors under the right names, with the scales that a server would use."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from assemble.checkpoint import Checkpoint
from assemble.errors import InputError
from quantize.evaluate.simulation import RoundingCache, inputs_of
from quantize.evaluate.weights import Weights
from quantize.runner import Outcome
from quantize.streaming.decoder import Decoder
from tests.quantize.evaluate.editing import Tensors, broken
from tests.quantize.evaluate.resident import values_of

PREFIX = "model.language_model.layers"


def opened(root: Path) -> Weights:
    return Weights(Checkpoint.open(root))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"moe": True},
        {"moe": True, "split": True},
        {"text_only": True, "keep_prefix": True},
        {"text_only": True, "float32": True},
    ],
    ids=str,
)
def test_every_tensor_of_the_source_has_its_place(options: dict, make_variant: Callable[..., Path]) -> None:
    weights = opened(make_variant(**options))
    decoder = Decoder(weights.architecture, "cpu")
    for index in range(decoder.num_layers):
        decoder.layer(index, weights.stored_layer(index).tensors())  # strict: nothing missing, nothing left over
    vocabulary, hidden = weights.architecture.text["vocab_size"], weights.architecture.text["hidden_size"]
    assert weights.embedding().shape == weights.lm_head().shape == (vocabulary, hidden)
    assert weights.final_norm().shape == (hidden,)
    head = weights.mtp_tensors()
    assert head["fc.weight"].shape == (hidden, 2 * hidden)
    assert len(head) == (19 if options.get("moe") else 15)
    assert weights.kv_fp8 is False


def test_quantized_matrices_are_the_references(quantized: Outcome) -> None:
    weights = opened(quantized.out)
    tensors = weights.stored_layer(3).tensors()
    for module in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"):
        torch.testing.assert_close(
            tensors[f"{module}.weight"], values_of(weights.checkpoint, f"{PREFIX}.3.{module}"), rtol=0, atol=0
        )
    torch.testing.assert_close(weights.lm_head(), values_of(weights.checkpoint, "lm_head"), rtol=0, atol=0)
    assert weights.kv_fp8


def test_fused_experts_are_gate_above_up(quantized_moe: Outcome) -> None:
    weights = opened(quantized_moe.out)
    fused = weights.stored_layer(1).tensors()["mlp.experts.gate_up_proj"]
    for expert in (0, 5):
        parts = [values_of(weights.checkpoint, f"{PREFIX}.1.mlp.experts.{expert}.{leaf}") for leaf in ("gate_proj", "up_proj")]
        torch.testing.assert_close(fused[expert], torch.cat(parts), rtol=0, atol=0)


def test_a_server_takes_the_largest_scale_of_a_group(quantized: Outcome, tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors[f"{PREFIX}.3.mlp.up_proj.weight_scale_2"] = tensors[f"{PREFIX}.3.mlp.up_proj.weight_scale_2"] / 4
        for leaf, factor in (("weight_scale", 4), ("input_scale", 2)):
            name = f"{PREFIX}.3.self_attn.k_proj.{leaf}"
            tensors[name] = tensors[name] * factor

    stored = opened(broken(quantized.out, tmp_path / "broken", change)).stored_layer(3)
    served = stored.served()
    up, down = served["mlp.up_proj"], served["mlp.down_proj"]
    assert up.tensor_scale == served["mlp.gate_proj"].tensor_scale == 4 * stored.matrices["mlp.up_proj"].tensor_scale
    torch.testing.assert_close(up.values(), 4 * stored.matrices["mlp.up_proj"].values())  # used as it is: four times too large
    assert down is stored.matrices["mlp.down_proj"]
    q, k = served["self_attn.q_proj"], served["self_attn.k_proj"]
    assert q.input_scale == k.input_scale == served["self_attn.v_proj"].input_scale
    assert q.scale == k.scale == stored.matrices["self_attn.k_proj"].scale
    mine, own = q.values(), stored.matrices["self_attn.q_proj"].values()
    assert not torch.equal(mine, own)  # encoded again with a larger scale: close, and coarser for the smallest
    assert (mine - own).abs().max() <= own.abs().max() / 16


def test_fp8_inputs_and_the_cache_are_simulated(quantized: Outcome) -> None:
    weights = opened(quantized.out)
    decoder = Decoder(weights.architecture, "cpu")
    linear, full = weights.layer(decoder, 0), weights.layer(decoder, 3)
    assert set(inputs_of(linear)) == {"linear_attn.in_proj_qkv", "linear_attn.in_proj_z", "linear_attn.out_proj"}
    assert set(inputs_of(full)) == {f"self_attn.{p}_proj" for p in "qkvo"}
    hidden = decoder.embed(weights.embedding(), torch.arange(40)[None])
    seen: list[torch.Tensor] = []
    full.self_attn.o_proj.register_forward_pre_hook(lambda _m, inputs: seen.append(inputs[0]))
    decoder.forward(full, hidden)
    scale = inputs_of(full)["self_attn.o_proj"].scale
    codes = (seen[0].float() / scale).to(torch.float8_e4m3fn).float() * scale
    torch.testing.assert_close(seen[0].float(), codes, rtol=2**-8, atol=0)  # on the grid, but for BF16
    plain = opened(quantized.out)
    plain.kv_fp8 = False
    assert not torch.equal(decoder.forward(full, hidden), decoder.forward(plain.layer(decoder, 3), hidden))


def test_the_cache_rounds_on_the_way_in() -> None:
    from transformers import DynamicCache

    inner = DynamicCache()
    cache = RoundingCache(inner, 1.0, 0.5)
    keys, values = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4) * 300
    cached_keys, cached_values = cache.update(keys, values, 0)
    torch.testing.assert_close(cached_keys, keys.to(torch.float8_e4m3fn).float(), rtol=0, atol=0)
    assert cached_values.abs().max() <= 224
    assert cache.get_seq_length() == inner.get_seq_length() == 3


def test_a_quantized_weight_without_its_scale_is_refused(quantized: Outcome, tmp_path: Path) -> None:
    root = broken(quantized.out, tmp_path / "broken", lambda _: None)
    weights = opened(root)
    tensors = {n: t for n, t in weights.checkpoint.tensors.items() if n != f"{PREFIX}.0.mlp.up_proj.weight_scale_2"}
    weights.checkpoint = Checkpoint(root, weights.checkpoint.config, tensors, weights.checkpoint.shards)
    with pytest.raises(InputError, match=r"layers\.0\.mlp\.up_proj has a quantized weight and no weight_scale_2"):
        weights.stored_layer(0)
