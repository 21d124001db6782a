"""Greedy drafting, from many positions of a text at once, exactly as a server does it from one.

When vLLM drafts at position t, the head's keys and values for 0 to t are those of its true inputs: whatever rejected drafts
left there was overwritten when the body had verified (vLLM 0.32 v1/spec_decode/llm_base_proposer.py `propose`: the first
pass runs the head over every verified token). The first draft is the head at t. For the next the head runs at t+1 with the
draft's embedding and its own output as the hidden state, attending to the true inputs up to t and to its own since; and so on.

Drafts at t depend on the text up to t+1 only, so all of them are computed side by side: one pass of the head over the text,
then one pass a draft in which query m may see the true keys up to its position and, of each earlier draft's keys, its own.
"""

from typing import Any

from quantize.evaluate.mtp_body import Body
from quantize.evaluate.mtp_head import Draft, Head

LOGITS_AT_ONCE = 64_000_000  # elements of a batch of logits: 128 MB in BF16


def draft(head: Head, body: Body, tokens: Any, hidden: Any, positions: Any, depth: int) -> Any:
    """Drafts `depth` tokens from each of some positions.

    Args:
        head: The MTP head.
        body: For embedding and lm_head.
        tokens: The text, [B, T + 1] int64; rows may be padded on the right.
        hidden: The body's states after the final norm, [B, T, H].
        positions: Where to draft from, [B, M] int64: at t the text is known up to token t+1 and the state up to t.
        depth: Drafts a position.

    Returns:
        [B, M, depth] int64: entry i of position t is the draft of token t+2+i.
    """
    import torch
    from transformers import DynamicCache

    rows, length = hidden.shape[:2]
    cache = DynamicCache()
    everywhere = torch.arange(length, device=hidden.device)
    causal = (everywhere[:, None] >= everywhere)[None, None].expand(rows, 1, -1, -1)
    first = Draft(everywhere.expand(rows, -1), causal, cache)
    out = head.forward(body.embed(tokens[:, 1:]), hidden, first)
    out = out.gather(1, positions[..., None].expand(-1, -1, out.shape[-1]))
    drafted = [greedy_tokens(body, out)]
    mask = (everywhere <= positions[..., None])[:, None]
    own = torch.eye(positions.shape[1], dtype=torch.bool, device=hidden.device).expand(rows, 1, -1, -1)
    for step in range(1, depth):
        mask = torch.cat([mask, own], dim=-1)
        out = head.forward(body.embed(drafted[-1]), out, Draft(positions + step, mask, cache))
        drafted.append(greedy_tokens(body, out))
    return torch.stack(drafted, dim=-1)


def greedy_tokens(body: Body, hidden: Any) -> Any:
    """The most likely next token for states [B, M, H]: [B, M] int64. Never holds all logits at once."""
    import torch

    flat = hidden.flatten(0, 1)
    if not len(flat):
        return torch.empty(hidden.shape[:2], dtype=torch.int64, device=hidden.device)
    vocabulary = body.logits(flat[:1]).shape[-1]
    step = max(1, LOGITS_AT_ONCE // vocabulary)
    return torch.cat([body.logits(part).argmax(-1) for part in flat.split(step)]).view(hidden.shape[:2])
