"""The gated delta rule, with transformers' own bits in a fraction of its time.

Without flash-linear-attention, transformers computes a layer of linear attention in plain PyTorch (models/qwen3_5/
modeling_qwen3_5.py `torch_chunk_gated_delta_rule`, version 5.14): most of a layer's time is copies that nothing needs and the
launches of some 700 small kernels. Here are the same operations on the same numbers in the same order, without the copies; on
a GPU some of them are steps of `kernels`.
"""

import sys
import threading
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

ATTRIBUTE, ORIGINAL = "chunk_gated_delta_rule", "torch_chunk_gated_delta_rule"
CHUNK = 64  # tokens
_COMPILING = threading.Lock()  # it is begun in the background, and whoever needs the rule waits for it

Rule = Callable[..., tuple[Tensor, Tensor | None]]


class Steps(NamedTuple):
    """Parts of the rule that a GPU has kernels for; see `kernels`."""

    times: Callable[[Tensor, Tensor | float], Tensor]
    key_parts: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
    inverse: Callable[[Tensor, Tensor], Tensor]


def installed(layer: nn.Module, device: torch.device) -> nn.Module:
    """The layer, its linear attention computed by the fastest rule that has the bits of transformers' PyTorch function."""
    for part in layer.modules():
        rule: Any = getattr(part, ATTRIBUTE, None)
        if rule and rule == getattr(sys.modules[type(part).__module__], ORIGINAL, None):
            setattr(part, ATTRIBUTE, same_rule(rule, device))
    return layer


def name_of(layer: nn.Module) -> str | None:
    """What computes the layer's delta rule: `kernels`, `torch`, or the module of another's function; None without one."""
    for part in layer.modules():
        rule: Any = getattr(part, ATTRIBUTE, None)
        if isinstance(rule, partial):
            return "torch" if rule.args == (TORCH,) else "kernels"
        if rule is not None:
            return str(rule.__module__)
    return None


def same_rule(original: Rule, device: torch.device) -> Rule:
    """The fastest rule that computes on the device what `original` does; on a GPU, compiles for a second or two."""
    with _COMPILING:
        return _same_rule(original, device)


@cache
def _same_rule(original: Rule, device: torch.device) -> Rule:
    candidates: list[Rule] = [*_with_kernels(device), partial(gated_delta_rule, TORCH)]
    for rule in candidates:
        try:
            if _same_bits(original, rule, device):
                return rule
        except torch.OutOfMemoryError:
            raise  # of this moment only
        except Exception:  # noqa: S112 - a compiler fails in many ways, a newer transformers calls otherwise
            continue
    return original


def _with_kernels(device: torch.device) -> list[Rule]:
    if device.type != "cuda":
        return []
    try:
        from quantize.streaming.faster import kernels
    except ImportError:  # without Triton it takes longer
        return []
    return [partial(gated_delta_rule, Steps(kernels.times, kernels.key_parts, kernels.inverse))]


def _same_bits(original: Rule, rule: Rule, device: torch.device) -> bool:
    """On whole chunks and on a part of one, with and without states. A state is float32, so no rounding hides a difference."""
    generator = torch.Generator().manual_seed(0)
    for tokens in (2 * CHUNK, 2 * CHUNK + 3):
        wide = torch.randn((2, tokens, 3 * 4 * 128), generator=generator).bfloat16().to(device)
        query, key, value = (part.view(2, tokens, 4, 128) for part in wide.chunk(3, dim=-1))  # as a layer's lie, side by side
        decay = -torch.rand(query.shape[:3], generator=generator).to(device)
        beta = torch.rand(query.shape[:3], generator=generator).bfloat16().to(device)
        state = torch.randn((2, 4, 128, 128), generator=generator).to(device)
        with_state: dict[str, Any] = {"initial_state": state, "output_final_state": True}
        for settings in ({}, with_state):
            ours, left = _computed(rule, [query, key, value, decay, beta], settings)
            theirs, expected = _computed(original, [query, key, value, decay, beta], settings)
            if not torch.equal(ours, theirs) or not torch.equal(left, expected):
                return False
    return True


def _computed(rule: Rule, example: list[Tensor], settings: dict[str, Any]) -> tuple[Tensor, Tensor]:
    made, state = rule(*example, use_qk_l2norm_in_kernel=True, **settings)
    return made, made.new_empty(0) if state is None else state


def gated_delta_rule(  # noqa: PLR0913, PLR0917 - the signature is transformers', after the steps
    steps: Steps,
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
        steps: How.
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
    if any(n & (n - 1) for n in (query.shape[-1], value.shape[-1])):  # the kernels want powers of two
        steps = TORCH
    if use_qk_l2norm_in_kernel:
        query, key = (x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + 1e-6) for x in (query, key))
    g = _chunks(g).cumsum(dim=-1)
    query = steps.times(query, 1 / (query.shape[-1] ** 0.5))  # all [B, H, C, 64, D] from here
    key, k_beta, k_grown = steps.key_parts(key, beta, g.exp())
    after = torch.ones((CHUNK, CHUNK), dtype=torch.bool, device=g.device).triu_(diagonal=1)
    decay = (g.unsqueeze(-1) - g.unsqueeze(-2)).masked_fill_(after, -torch.inf).exp_()
    inverse = steps.inverse(k_beta @ key.transpose(-1, -2), decay)
    del k_beta
    k_cumdecay = inverse @ k_grown
    del k_grown  # nothing that is not needed may lie beside the values: this is where a layer wants most memory
    value = inverse @ steps.times(value, beta)
    del inverse
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
        if i + 1 == query.shape[2] and not output_final_state:
            break
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


def _times(x: Tensor, factor: Tensor | float) -> Tensor:
    return _chunks(x) * (factor if isinstance(factor, float) else _chunks(factor).unsqueeze(-1))


def _key_parts(key: Tensor, beta: Tensor, growth: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    key = _chunks(key)
    k_beta = key * _chunks(beta).unsqueeze(-1)
    return key, k_beta, k_beta * growth.unsqueeze(-1)


def _inverse(products: Tensor, decay: Tensor) -> Tensor:
    """The inverse of 1 + the part of products x decay, float32 [..., 64, 64], below the diagonal, by forward substitution."""
    above = torch.ones((CHUNK, CHUNK), dtype=torch.bool, device=products.device).triu_()
    made = (products * decay).masked_fill_(above, 0).neg_()
    for i in range(1, CHUNK):
        row = made[..., i, :i]
        row += (row.unsqueeze(-1) * made[..., :i, :i]).sum(-2)
    return made.add_(torch.eye(CHUNK, dtype=made.dtype, device=made.device))


TORCH = Steps(_times, _key_parts, _inverse)
