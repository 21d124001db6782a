"""The oracle: drafting one position at a time, with the head as the tiny models were trained with it."""

from collections.abc import Mapping

import torch
import transformers

from assemble.architecture import Architecture
from quantize.models.train_tiny import Head as TrainedHead
from quantize.models.train_tiny import Library

Tensors = Mapping[str, torch.Tensor]


def trained_head(architecture: Architecture, tensors: Tensors) -> TrainedHead:
    """The trainer's own head with these weights (experts fused)."""
    library = Library("moe" if architecture.moe else "dense")
    text = transformers.CONFIG_MAPPING[f"{architecture.model_type}_text"](
        **{key: value for key, value in architecture.text.items() if key != "model_type"}
    )
    text._attn_implementation, text._experts_implementation = "eager", "eager"
    head = TrainedHead(library, text)
    head.load_state_dict(dict(tensors), strict=True)
    return head.to(torch.bfloat16).eval()


def draft_one_by_one(
    head: TrainedHead, model: torch.nn.Module, tokens: torch.Tensor, hidden: torch.Tensor, position: int, depth: int
) -> list[int]:
    """Drafts from one position of one row: the head runs over its whole input again for each draft.

    Args:
        head: From `trained_head`.
        model: The whole transformers model.
        tokens: The row, [T + 1].
        hidden: The body's states, [T, H].
        position: Where to draft from.
        depth: Drafts.
    """
    decoder = getattr(model.model, "language_model", model.model)
    embedded = decoder.embed_tokens(tokens[None, 1 : position + 2])
    states = hidden[None, : position + 1]
    drafted = []
    for _ in range(depth):
        positions = torch.arange(states.shape[1])[None]
        rotary = decoder.rotary_emb(states, positions[None].expand(3, -1, -1))
        out = head(embedded, states, rotary)[:, -1:]
        token = model.lm_head(out).argmax(-1)
        drafted.append(int(token))
        embedded = torch.cat([embedded, decoder.embed_tokens(token)], dim=1)
        states = torch.cat([states, out], dim=1)
    return drafted
