"""The body's own greedy continuation, with its states: the text that drafts are held against.

The text is made the way a server with MTP makes it: the head drafts, one pass of the body verifies the drafts of all rows,
the longest right prefix and one more token are taken. Each pass starts where all rows were settled some time ago, so it
goes over some tokens again. That costs arithmetic and saves weights: for a model that is read a layer at a time, the time of
a pass is that of reading its weights, and 128 tokens cost about 60 readings where a token a pass would cost 128. Rows need
not advance in step, and a rejected draft leaves nothing behind in the state of the linear-attention layers. A head that is
of no use slows this down to a token a pass; the text is the same but for near ties.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quantize.evaluate.mtp_body import Body
from quantize.evaluate.mtp_draft import draft, greedy_tokens
from quantize.evaluate.mtp_head import Head

PAD_TO = 32  # row lengths are rounded up, so that a body meets few shapes
GUESS_FROM = 64  # tokens that the head is shown for a guess
READ_ON_AFTER = 48  # settled tokens of all rows after which they are read for good, with a pass of their own


@dataclass(frozen=True)
class Continuation:
    """Prompts, continued.

    Attributes:
        tokens: Prompts and continuations, [B, L] int64.
        hidden: The body's states after the final norm, [B, L - 1, H]: for every token but the last.
        start: Tokens of a prompt.
        num_tokens: Tokens that were added to each.
        passes: Passes of the body that it took.
    """

    tokens: Any
    hidden: Any
    start: int
    num_tokens: int
    passes: int


def continue_greedily(
    body: Body, prompts: list[list[int]], num_tokens: int, head: Head | None, depth: int, progress: Callable[[int], None]
) -> Continuation:
    """Continues each prompt by its most likely tokens, past any end-of-text token.

    Args:
        body: The model.
        prompts: Token ids, all prompts of one length.
        num_tokens: How many to add.
        head: Drafts ahead, to save passes; None takes a token a pass. It does not change the text, but for near ties.
        depth: Drafts a pass.
        progress: Called with the number of tokens that each pass added, all rows together.
    """
    import torch

    end = len(prompts[0]) + num_tokens
    body.start()
    kept = body.read(torch.tensor(prompts, dtype=torch.int64, device=body.device))
    rows = [[*own, first] for own, first in zip(prompts, greedy_tokens(body, kept[:, -1:])[:, 0].tolist(), strict=True)]
    states = list(kept)
    passes = 1
    progress(len(rows))
    while (shortest := min(map(len, rows))) < end:
        read = kept.shape[1]
        if shortest - 1 - read >= READ_ON_AFTER:
            settled = torch.tensor([row[read : shortest - 1] for row in rows], dtype=torch.int64, device=body.device)
            kept = torch.cat([kept, body.read(settled)], dim=1)
            read, passes = shortest - 1, passes + 1
        left = [r for r, row in enumerate(rows) if len(row) < end]
        proposals = _proposed(head, body, rows, states, left, depth) if head is not None else [[] for _ in rows]
        texts = [row[read:] + more for row, more in zip(rows, proposals, strict=True)]
        hidden = body.extend(_padded(texts, body.device))
        passes += 1
        before = sum(map(len, rows))
        verified = _verified(body, hidden[left], [texts[r] for r in left], [proposals[r] for r in left])
        for r, gained in zip(left, verified, strict=True):
            rows[r] = (rows[r] + gained)[:end]
            states[r] = torch.cat([kept[r], hidden[r]])[: len(rows[r]) - 1]  # at its last token the pass had a wrong proposal
        progress(sum(map(len, rows)) - before)
    tokens = torch.tensor(rows, device=body.device)
    return Continuation(tokens, torch.stack(states), len(prompts[0]), num_tokens, passes)


def _verified(body: Body, hidden: Any, texts: list[list[int]], proposals: list[list[int]]) -> list[list[int]]:
    """The tokens that each row gains: its proposals as far as they are the body's own choice, and the choice after them."""
    import torch

    ahead = torch.arange(max(map(len, proposals)) + 1, device=hidden.device)
    last = [len(text) - len(proposed) - 1 for text, proposed in zip(texts, proposals, strict=True)]
    where = (torch.tensor(last, device=hidden.device)[:, None] + ahead).clamp(max=hidden.shape[1] - 1)
    chosen = greedy_tokens(body, hidden.gather(1, where[..., None].expand(-1, -1, hidden.shape[-1]))).tolist()
    gained = []
    for proposed, choice in zip(proposals, chosen, strict=True):
        right = next((i for i, token in enumerate(proposed) if token != choice[i]), len(proposed))
        gained.append(choice[: right + 1])
    return gained


def _proposed(head: Head, body: Body, rows: list[list[int]], states: list[Any], left: list[int], depth: int) -> list[list[int]]:
    """The head's drafts after each unfinished row's last token. It is shown the last tokens only: a guess may be cheap."""
    import torch

    proposals: list[list[int]] = [[] for _ in rows]
    hidden = torch.nn.utils.rnn.pad_sequence([states[r][-GUESS_FROM:] for r in left], batch_first=True)
    texts = [rows[r][-GUESS_FROM - 1 :] for r in left]
    tokens = _padded(texts, body.device)[:, : hidden.shape[1] + 1]
    positions = torch.tensor([[len(text) - 2] for text in texts], device=body.device)
    drafted = draft(head, body, tokens, hidden, positions, depth)[:, 0].tolist()
    for r, row in zip(left, drafted, strict=True):
        proposals[r] = row
    return proposals


def _padded(rows: list[list[int]], device: Any) -> Any:
    import torch

    width = -(-max(len(row) for row in rows) // PAD_TO) * PAD_TO
    return torch.tensor([row + [0] * (width - len(row)) for row in rows], dtype=torch.int64, device=device)
