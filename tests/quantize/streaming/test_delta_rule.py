"""The gated delta rule gives transformers' own bits, and is put only where that function was."""

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING
from transformers.models.qwen3_5 import modeling_qwen3_5 as dense
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as mixture

from quantize.streaming import delta_rule, delta_rule_triton
from quantize.streaming.delta_rule import chunk_gated_delta_rule, installed

GPU = pytest.param("cuda", marks=pytest.mark.gpu)


def example(batch: int, tokens: int, heads: int, seed: int, device: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    vectors = [torch.randn((batch, tokens, heads, n), generator=generator).bfloat16() for n in (128, 128, 64)]
    decay = -3 * torch.rand((batch, tokens, heads), generator=generator)
    beta = torch.rand((batch, tokens, heads), generator=generator).bfloat16()
    return [t.to(device) for t in (*vectors, decay, beta)]


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("modeling", [dense, mixture])
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 63, 4), (3, 64, 2), (2, 200, 3), (16, 512, 8)])
def test_the_same_bits(modeling: Any, shape: tuple[int, int, int], device: str) -> None:
    inputs = example(*shape, seed=sum(shape), device=device)
    before = [t.clone() for t in inputs]
    state = torch.randn((shape[0], shape[2], 128, 64), generator=torch.Generator().manual_seed(1)).to(device)
    for settings in ({}, {"initial_state": state.clone(), "output_final_state": True}):
        ours, left = chunk_gated_delta_rule(*inputs, use_qk_l2norm_in_kernel=True, **settings)
        theirs, expected = modeling.torch_chunk_gated_delta_rule(*inputs, use_qk_l2norm_in_kernel=True, **settings)
        assert ours.isfinite().all()
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours.view(torch.int16), theirs.view(torch.int16))
        assert (left is None) == (expected is None) == (not settings)
        if settings:
            assert torch.equal(left.view(torch.int32), expected.view(torch.int32))
            assert torch.equal(settings["initial_state"], state), "the state is the caller's"
    assert all(torch.equal(a, b) for a, b in zip(before, inputs, strict=True)), "the inputs are the caller's"


def linear_attention(monkeypatch: pytest.MonkeyPatch, rule: Any) -> torch.nn.Module:
    monkeypatch.setattr(dense, "torch_chunk_gated_delta_rule", rule)
    config = CONFIG_MAPPING["qwen3_5_text"](
        hidden_size=64, linear_num_value_heads=2, linear_num_key_heads=2, num_hidden_layers=1
    )
    return dense.Qwen3_5GatedDeltaNet(config, 0)


def test_a_layer_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = linear_attention(monkeypatch, dense.torch_chunk_gated_delta_rule)
    assert installed(layer, torch.device("cpu")).chunk_gated_delta_rule is chunk_gated_delta_rule


def test_a_function_with_other_bits_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    original = dense.torch_chunk_gated_delta_rule

    def newer(*inputs: Any, **settings: Any) -> Any:
        made, state = original(*inputs, **settings)
        return made * 1.01, state

    layer = linear_attention(monkeypatch, newer)
    assert installed(layer, torch.device("cpu")).chunk_gated_delta_rule is newer


def test_a_kernel_of_another_library_stays() -> None:
    layer = torch.nn.Module()
    layer.chunk_gated_delta_rule = print  # flash-linear-attention's, say
    assert installed(layer, torch.device("cpu")).chunk_gated_delta_rule is print


def test_a_function_with_other_arguments_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def newer(query: Any, *, heads: int) -> Any:
        return query[:heads], None

    layer = linear_attention(monkeypatch, newer)
    assert installed(layer, torch.device("cpu")).chunk_gated_delta_rule is newer


def test_the_decoder_uses_it(tiny: Any) -> None:
    from assemble.architecture import read_architecture
    from assemble.checkpoint import Checkpoint
    from quantize.streaming.decoder import Decoder
    from quantize.streaming.reading import read_layer

    source = Checkpoint.open(tiny)
    architecture = read_architecture(source.config, source)
    layer = Decoder(architecture, "cpu").layer(0, read_layer(source, architecture, 0))
    assert layer.linear_attn.chunk_gated_delta_rule is chunk_gated_delta_rule
    assert delta_rule.ATTRIBUTE in vars(layer.linear_attn)


@pytest.mark.gpu
def test_the_kernel_has_the_bits_of_the_loop() -> None:
    device = torch.device("cuda", 0)
    assert delta_rule_triton.available(device, delta_rule._inverse)
    products = torch.randn((16, 32, 8, 64, 64), generator=torch.Generator().manual_seed(0)).mul_(0.2).to(device)
    decay = torch.rand(products.shape, generator=torch.Generator().manual_seed(1)).to(device)
    expected = delta_rule._inverse(products, decay)
    assert torch.equal(delta_rule_triton.inverse(products, decay), expected)


def test_without_triton_the_loop_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ModuleNotFoundError("triton")

    monkeypatch.setattr(delta_rule_triton, "_kernel", missing)
    assert not delta_rule_triton.available.__wrapped__(torch.device("cpu"), delta_rule._inverse)
