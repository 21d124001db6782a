"""What stands in for transformers' functions has their bits, and is put only where they were."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING
from transformers.models.qwen3_5 import modeling_qwen3_5 as dense
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as mixture

from assemble.architecture import read_architecture
from assemble.checkpoint import Checkpoint
from quantize.streaming.decoder import Decoder
from quantize.streaming.faster import convolution, delta_rule
from quantize.streaming.faster.delta_rule import TORCH, gated_delta_rule, installed, name_of, same_rule
from quantize.streaming.reading import read_layer

CPU = torch.device("cpu")
RULE = partial(gated_delta_rule, TORCH)


def example(batch: int, tokens: int, heads: int, seed: int, device: torch.device) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    vectors = [torch.randn((batch, tokens, heads, n), generator=generator).bfloat16() for n in (128, 128, 64)]
    decay = -3 * torch.rand((batch, tokens, heads), generator=generator)
    beta = torch.rand((batch, tokens, heads), generator=generator).bfloat16()
    return [t.to(device) for t in (*vectors, decay, beta)]


def assert_same_bits(rule: Any, modeling: Any, shape: tuple[int, int, int], device: torch.device) -> None:
    inputs = example(*shape, seed=sum(shape), device=device)
    before = [t.clone() for t in inputs]
    state = torch.randn((shape[0], shape[2], 128, 64), generator=torch.Generator().manual_seed(1)).to(device)
    for settings in ({}, {"initial_state": state.clone(), "output_final_state": True}):
        ours, left = rule(*inputs, use_qk_l2norm_in_kernel=True, **settings)
        theirs, expected = modeling.torch_chunk_gated_delta_rule(*inputs, use_qk_l2norm_in_kernel=True, **settings)
        assert ours.isfinite().all()
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours.view(torch.int16), theirs.view(torch.int16))
        assert (left is None) == (expected is None) == (not settings)
        if settings:
            assert torch.equal(left.view(torch.int32), expected.view(torch.int32))
            assert torch.equal(settings["initial_state"], state), "the state is the caller's"
    assert all(torch.equal(a, b) for a, b in zip(before, inputs, strict=True)), "the inputs are the caller's"


@pytest.mark.parametrize("modeling", [dense, mixture])
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 63, 4), (3, 64, 2), (2, 200, 3)])
def test_the_delta_rule(modeling: Any, shape: tuple[int, int, int]) -> None:
    assert_same_bits(RULE, modeling, shape, CPU)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 63, 4), (3, 64, 2), (2, 200, 3), (16, 512, 32)])
def test_the_delta_rule_on_a_gpu(shape: tuple[int, int, int]) -> None:
    device = torch.device("cuda", 0)
    rule = same_rule(dense.torch_chunk_gated_delta_rule, device)
    assert rule.args[0] != TORCH, "with kernels"
    assert_same_bits(rule, dense, shape, device)
    assert_same_bits(RULE, dense, shape, device)


@pytest.mark.gpu
def test_the_convolution_on_a_gpu() -> None:
    device = torch.device("cuda", 0)
    x = torch.randn((16, 512, 8192), device=device).bfloat16().transpose(1, 2)
    weight = torch.randn((8192, 4), device=device).bfloat16()
    first, second = (convolution.causal_conv1d(x, weight) for _ in range(2))
    assert convolution._same[16, 8192, 512, device]
    assert torch.equal(first, second)
    assert second.stride() != first.stride(), "the second is the kernel's"


def test_a_convolution_with_other_bits_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(2, 8, 5).bfloat16(), torch.randn(8, 4).bfloat16()
    expected = convolution._by_pytorch(x, weight)
    for other in (lambda *_: expected * 1.01, lambda *_: 1 // 0):
        monkeypatch.setattr(convolution, "_by_kernel", other)
        monkeypatch.setattr(convolution, "_same", {})
        for _ in range(2):
            assert torch.equal(convolution.causal_conv1d(x, weight), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("value_heads", [4, 8])
def test_a_whole_layer_on_a_gpu(value_heads: int) -> None:
    device = torch.device("cuda", 0)
    layer = linear_attention(value_heads=value_heads, key_heads=4).to(device, torch.bfloat16)
    hidden = torch.randn((8, 300, 256), generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)
    with torch.inference_mode():
        expected = layer(hidden)
        faster = convolution.installed(installed(layer, device), device)
        assert (faster.causal_conv1d_fn is None) == (value_heads == 4)
        assert torch.equal(faster(hidden), expected)


def linear_attention(value_heads: int = 2, key_heads: int = 2) -> torch.nn.Module:
    heads = {"linear_num_value_heads": value_heads, "linear_num_key_heads": key_heads}
    config = CONFIG_MAPPING["qwen3_5_text"](hidden_size=256, num_hidden_layers=1, **heads)
    return dense.Qwen3_5GatedDeltaNet(config, 0).requires_grad_(requires_grad=False)


def test_a_layer_gets_it() -> None:
    rule = installed(linear_attention(), CPU).chunk_gated_delta_rule
    assert rule.func is gated_delta_rule
    assert rule.args == (TORCH,)
    assert name_of(installed(linear_attention(), CPU)) == "torch"
    assert name_of(torch.nn.Linear(1, 1)) is None


def test_a_function_with_other_bits_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    original = dense.torch_chunk_gated_delta_rule

    def newer(*inputs: Any, **settings: Any) -> Any:
        made, state = original(*inputs, **settings)
        return made * 1.01, state

    monkeypatch.setattr(dense, "torch_chunk_gated_delta_rule", newer)
    layer = installed(linear_attention(), CPU)
    assert layer.chunk_gated_delta_rule is newer
    assert name_of(layer) == newer.__module__


def test_a_state_with_other_bits_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    original = dense.torch_chunk_gated_delta_rule

    def newer(*inputs: Any, **settings: Any) -> Any:
        made, state = original(*inputs, **settings)
        return made, None if state is None else torch.nextafter(state, torch.zeros_like(state))

    monkeypatch.setattr(dense, "torch_chunk_gated_delta_rule", newer)
    assert installed(linear_attention(), CPU).chunk_gated_delta_rule is newer


def test_a_function_with_other_arguments_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def newer(query: Any, *, heads: int) -> Any:
        return query[:heads], None

    monkeypatch.setattr(dense, "torch_chunk_gated_delta_rule", newer)
    assert installed(linear_attention(), CPU).chunk_gated_delta_rule is newer


def test_a_kernel_of_another_library_stays() -> None:
    layer = torch.nn.Module()
    layer.chunk_gated_delta_rule = layer.causal_conv1d_fn = print  # flash-linear-attention's and causal-conv1d's, say
    faster = convolution.installed(installed(layer, CPU), CPU)
    assert faster.chunk_gated_delta_rule is faster.causal_conv1d_fn is print


def test_kernels_that_fail_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any, **__: Any) -> Any:
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")

    monkeypatch.setattr(delta_rule, "_with_kernels", lambda _device: [failing])
    assert delta_rule._same_rule.__wrapped__(dense.torch_chunk_gated_delta_rule, CPU).args == (TORCH,)


def test_the_decoder_uses_it(tiny: Path) -> None:
    source = Checkpoint.open(tiny)
    architecture = read_architecture(source.config, source)
    layer = Decoder(architecture, "cpu").layer(0, read_layer(source, architecture, 0))
    assert layer.linear_attn.chunk_gated_delta_rule.func is gated_delta_rule
    assert layer.linear_attn.causal_conv1d_fn is None
