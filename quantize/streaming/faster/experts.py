"""The routed experts of a mixture, without a wait for each of them.

transformers' own loop (models/qwen3_5_moe/modeling_qwen3_5_moe.py `Qwen3_5MoeExperts.forward`, which ModelOpt's calibration
runs too) asks the GPU for each of 256 experts which tokens are its. Here they are sorted once, with one question. The
matrix products are the same, on the same rows in the same order, and so are the sums; a test holds the results equal, bit for
bit. transformers' faster ways (`grouped_mm`) round otherwise, and with them the measured input scales.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

NAME = "sorted"


def register_sorted_experts() -> str:
    """Makes the implementation known to transformers; returns its name, for `_experts_implementation`."""
    if NAME not in ALL_EXPERTS_FUNCTIONS.valid_keys():
        ALL_EXPERTS_FUNCTIONS.register(NAME, sorted_experts)
    return NAME


def sorted_experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The sum of the chosen experts' outputs [T, H].

    Args:
        self: The module, with `gate_up_proj` [E, 2I, H], `down_proj` [E, H, I] and `act_fn`.
        hidden_states: BF16 [T, H].
        top_k_index: Chosen experts [T, k].
        top_k_weights: Their weights [T, k].
    """
    tokens = len(top_k_index)
    chosen = top_k_index.T.reshape(-1)  # first choices first, as the loop meets them
    order = torch.argsort(chosen, stable=True)
    token = order % tokens
    weight = top_k_weights.T.reshape(-1)[order].unsqueeze(1)
    counts = torch.bincount(chosen, minlength=self.num_experts).tolist()
    result = torch.zeros_like(hidden_states)
    start = 0
    for expert, count in enumerate(counts):
        if count == 0:
            continue
        mine = slice(start, start + count)
        start += count
        gate, up = torch.nn.functional.linear(hidden_states[token[mine]], self.gate_up_proj[expert]).chunk(2, dim=-1)
        output = torch.nn.functional.linear(self.act_fn(gate) * up, self.down_proj[expert]) * weight[mine]
        result.index_add_(0, token[mine], output.to(result.dtype))
    return result
