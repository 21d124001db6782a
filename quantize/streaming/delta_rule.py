"""The gated delta rule, with transformers' own bits and half its work.

Without flash-linear-attention, transformers computes a layer of linear attention in plain PyTorch (models/qwen3_5/
modeling_qwen3_5.py `torch_chunk_gated_delta_rule`, version 5.14): most of a layer's time is copies that nothing needs and the
launches of some 700 small kernels. Here are the same operations on the same numbers in the same order, without the copies.
`installed` puts it into a layer after it has given the same bits as the layer's own function on a small example, so another
version of transformers that computes otherwise keeps its own.
"""

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from quantize.streaming import delta_rule_triton

ATTRIBUTE, ORIGINAL = "chunk_gated_delta_rule", "torch_chunk_gated_delta_rule"
CHUNK = 64  # tokens

Rule = Callable[..., tuple[Tensor, Tensor | None]]


def prepare(device: torch.device) -> None:
    """Compiles what a GPU needs, which takes a second once."""
    if device.type == "cuda":
        delta_rule_triton.available(device, _inverse)


def installed(layer: nn.Module, device: torch.device) -> nn.Module:
    """The layer, its linear attention computed by `chunk_gated_delta_rule` where transformers' PyTorch function would be."""
    for part in layer.modules():
        original = getattr(sys.modules[type(part).__module__], ORIGINAL, None)
        if original is not None and getattr(part, ATTRIBUTE, None) is original and _same_bits(original, device):
            setattr(part, ATTRIBUTE, chunk_gated_delta_rule)
    return layer


@cache
def _same_bits(original: Rule, device: torch.device) -> bool:
    """Whether the function computes what `chunk_gated_delta_rule` does, on two chunks and a bit, with and without states."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn((2, 2 * CHUNK + 3, 2, n), generator=generator).bfloat16() for n in (16, 16, 32))
    decay = -torch.rand(query.shape[:3], generator=generator)
    beta = torch.rand(query.shape[:3], generator=generator).bfloat16()
    state = torch.randn((2, 2, 16, 32), generator=generator)
    *example, state = (t.to(device) for t in (query, key, value, decay, beta, state))
    with_state: dict[str, Any] = {"initial_state": state, "output_final_state": True}
    for settings in ({}, with_state):
        ours, left = _computed(chunk_gated_delta_rule, example, settings)
        try:
            theirs, expected = _computed(original, example, settings)
        except TypeError:  # other arguments
            return False
        if not torch.equal(ours, theirs) or not torch.equal(left, expected):
            return False
    return True


def _computed(rule: Rule, example: list[Tensor], settings: dict[str, Any]) -> tuple[Tensor, Tensor]:
    made, state = rule(*example, use_qk_l2norm_in_kernel=True, **settings)
    return made, made.new_empty(0) if state is None else state


def chunk_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **_: object,
) -> tuple[Tensor, Tensor | None]:
    """Linear attention, 64 tokens at a time.

    Args:
        query: [B, T, H, Dk], as key.
        key: [B, T, H, Dk].
        value: [B, T, H, Dv].
        g: The logarithm of the decay, float32 [B, T, H].
        beta: [B, T, H].
        initial_state: What earlier tokens left, [B, H, Dk, Dv].
        output_final_state: Whether the state after the last token is returned.
        use_qk_l2norm_in_kernel: Whether query and key are still to be normalized.
        _: What transformers passes to other implementations, and its own ignores too.

    Returns:
        [B, T, H, Dv] in the query's dtype, and the state, float32 [B, H, Dk, Dv], or None.
    """
    dtype, tokens = query.dtype, query.shape[1]
    if use_qk_l2norm_in_kernel:
        query, key = (x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + 1e-6) for x in (query, key))
    query, key, value, beta, g = (_chunks(x) for x in (query, key, value, beta, g))  # [B, H, C, 64, ...]
    query = query * (1 / (query.shape[-1] ** 0.5))
    v_beta, k_beta = value * beta.unsqueeze(-1), key * beta.unsqueeze(-1)
    g = g.cumsum(dim=-1)
    after = torch.ones((CHUNK, CHUNK), dtype=torch.bool, device=g.device).triu_(diagonal=1)
    decay = (g.unsqueeze(-1) - g.unsqueeze(-2)).masked_fill_(after, -torch.inf).exp_()
    solve = delta_rule_triton.inverse if g.is_cuda and delta_rule_triton.available(g.device, _inverse) else _inverse
    mixed = solve(k_beta @ key.transpose(-1, -2), decay)
    value = mixed @ v_beta
    k_cumdecay = mixed @ k_beta.mul_(g.exp().unsqueeze(-1))
    del mixed, v_beta, k_beta
    if initial_state is None:
        state = torch.zeros((*key.shape[:2], key.shape[-1], value.shape[-1]), dtype=value.dtype, device=value.device)
    else:
        state = initial_state.to(value, copy=True)
    out = torch.empty_like(value)
    for i in range(query.shape[2]):
        q_i, k_i, g_i = query[:, :, i], key[:, :, i], g[:, :, i]
        attention = (q_i @ k_i.transpose(-1, -2)).mul_(decay[:, :, i])
        v_new = value[:, :, i] - k_cumdecay[:, :, i] @ state
        between = (q_i * g_i.unsqueeze(-1).exp()) @ state
        torch.add(between, attention @ v_new, out=out[:, :, i])
        last = g_i[:, :, -1, None]
        state = state.mul_(last.unsqueeze(-1).exp()).add_((k_i * (last - g_i).exp().unsqueeze(-1)).transpose(-1, -2) @ v_new)
    out = out.flatten(2, 3)[:, :, :tokens]
    return out.transpose(1, 2).to(dtype, memory_format=torch.contiguous_format), state if output_final_state else None


def _chunks(x: Tensor) -> Tensor:
    """[B, T, H, ...] to float32 [B, H, chunks, 64, ...], with zeros behind the last token."""
    x = x.transpose(1, 2).to(torch.float32, memory_format=torch.contiguous_format)
    if lack := -x.shape[2] % CHUNK:
        x = functional.pad(x, (0, lack) if x.dim() == 3 else (0, 0, 0, lack))
    return x.view(*x.shape[:2], -1, CHUNK, *x.shape[3:])


def _inverse(products: Tensor, decay: Tensor) -> Tensor:
    """The inverse of 1 + the part of products x decay, float32 [..., 64, 64], below the diagonal, by forward substitution."""
    above = torch.ones((CHUNK, CHUNK), dtype=torch.bool, device=products.device).triu_()
    made = (products * decay).masked_fill_(above, 0).neg_()
    for i in range(1, CHUNK):
        row = made[..., i, :i]
        row += (row.unsqueeze(-1) * made[..., :i, :i]).sum(-2)
    return made.add_(torch.eye(CHUNK, dtype=made.dtype, device=made.device))
