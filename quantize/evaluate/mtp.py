"""Will the head still draft? Acceptance of the MTP head's drafts, measured offline, before anyone serves.

A body continues prompts greedily, heads draft from every position of that text, and a walk over it counts what a server
would have accepted, for K = 1 to 6 drafts a step. Every head is tried with every body: BF16 body and BF16 head is what the
source does, quantized body and BF16 head is what this project writes, and a head whose matrices are rounded to FP8 or NVFP4
is what others write.

mtp_head.py    the head                      mtp_body.py    the model that it drafts for    mtp_cast.py    rounded heads
mtp_greedy.py  the model's own text          mtp_draft.py   drafting along it               mtp_faults.py  what is wrong
mtp_acceptance.py  counting, and what pays   mtp_result.py  the report                      mtp_family.py  classes
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from assemble.errors import InputError
from quantize.console import Reporter
from quantize.evaluate import mtp_result
from quantize.evaluate.mtp_acceptance import Acceptance, Costs, costs, count, leading_matches
from quantize.evaluate.mtp_body import Body, LayerwiseBody
from quantize.evaluate.mtp_cast import BYTES, cast_head
from quantize.evaluate.mtp_draft import draft
from quantize.evaluate.mtp_faults import Finding, inspect_head
from quantize.evaluate.mtp_greedy import Continuation, continue_greedily
from quantize.evaluate.mtp_head import Head, HeadError, absent_tensors, check_complete
from quantize.evaluate.weights import Weights

PROMPTS_AT_ONCE = 16
RESERVE_BYTES = 8 * 10**9  # of a GPU's free memory, for states, logits and a layer that comes and goes

markdown, print_result = mtp_result.markdown, mtp_result.print_result


@dataclass(frozen=True)
class Settings:
    """What is measured, and what a draft costs.

    Attributes:
        num_prompts: Prompts.
        prompt_tokens: Tokens of each; rows that are shorter are left out.
        new_tokens: Greedy tokens that each prompt is continued by.
        max_drafts: The largest K.
        casts: Formats to round the head's matrices to, besides: `FP8`, `NVFP4`.
        draft_cost: A pass of the head beside a pass of the body; None: from the bytes they read.
        verify_cost: One more token in a pass of the body; None: from the bytes.
    """

    num_prompts: int = 16
    prompt_tokens: int = 256
    new_tokens: int = 128
    max_drafts: int = 6
    casts: Sequence[str] = ()
    draft_cost: float | None = None
    verify_cost: float | None = None


@dataclass(frozen=True)
class Case:
    """One head on one body, for each K."""

    body: str
    head: str
    acceptances: Mapping[int, Acceptance]
    costs: Costs


def evaluate_mtp(
    source: Weights | None, checkpoint: Weights, rows: list[list[int]], settings: Settings, device: str, reporter: Reporter,
    *, origin: Weights | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Measures a checkpoint's head, beside its source's.

    Args:
        source: The BF16 source; None to measure the checkpoint alone.
        checkpoint: What was written.
        rows: Held-out text as token ids; the first `num_prompts` that are long enough become prompts.
        settings: What to measure.
        device: `cpu` or `cuda`.
        reporter: Where progress goes.
        origin: Where the head was taken from, if not from the source: its head is then what the checkpoint's should be.

    Returns:
        Plain data: see `mtp_result.result`.

    Raises:
        InputError: no row is long enough.
    """
    import torch

    started = time.monotonic()
    prompts = choose_prompts(rows, settings)
    original, original_fault, _ = _read_head(origin or source)
    own, fault, absent = _read_head(checkpoint)
    findings = [Finding(name, "absent") for name in absent] or inspect_head(own, original or None)
    heads = {"source": (original, original_fault), "checkpoint": (own, fault)}
    sound = {name: tensors for name, (tensors, wrong) in heads.items() if wrong is None}
    cases, passes, texts = [], {}, {}
    with torch.inference_mode():
        for name, weights in (("bf16", source), ("quantized", checkpoint)):
            tried = _tried(name, sound, settings)
            if weights is None or not tried:
                continue
            body = open_body(weights, device)
            text, measured = measure_body(name, body, weights, tried, prompts, settings, reporter)
            cases += measured
            passes[name], texts[name] = text.passes, text
            del body
    return mtp_result.result(
        cases=cases, findings=findings, fault=fault, settings=settings,
        num_prompts=len(prompts), passes=passes, agreement=_agreement(texts), seconds=time.monotonic() - started,
    )  # fmt: skip


def choose_prompts(rows: list[list[int]], settings: Settings) -> list[list[int]]:
    """The first rows that are long enough, cut to length.

    Raises:
        InputError: there is none.
    """
    long = [list(row[: settings.prompt_tokens]) for row in rows if len(row) >= settings.prompt_tokens]
    if not long:
        longest = max((len(row) for row in rows), default=0)
        raise InputError(
            f"no row of the held-out text has {settings.prompt_tokens} tokens (the longest has {longest}), and drafting is "
            "measured on prompts of that length. Give longer text."
        )
    return long[: settings.num_prompts]


def measure_body(
    name: str, body: Body, weights: Weights, heads: Mapping[str, Mapping[str, Any]], prompts: list[list[int]],
    settings: Settings, reporter: Reporter,
) -> tuple[Continuation, list[Case]]:  # fmt: skip
    """Continues the prompts with a body and counts what it accepts of each head's drafts.

    Args:
        name: What the body is called.
        body: The body.
        weights: Of the checkpoint that the body is; for its architecture and KV cache.
        heads: Heads by name; the first one also helps to make the text.
        prompts: Token ids.
        settings: Numbers of tokens and drafts.
        reporter: Where progress goes.
    """

    def loaded(tensors: Mapping[str, Any]) -> Head:
        return Head(weights.architecture, tensors, body.device, kv_fp8=weights.kv_fp8)

    first, head = next(iter(heads)), loaded(next(iter(heads.values())))
    added = settings.new_tokens + settings.max_drafts - 1  # the last draft's last target
    with reporter.task(f"{name} text", added * len(prompts)) as progress:
        text = continue_greedily(body, prompts, added, head, settings.max_drafts, progress)
    cases = []
    with reporter.task(f"{name} drafts", len(heads) * len(prompts)) as progress:
        for head_name, tensors in heads.items():
            head = head if head_name == first else loaded(tensors)
            matches = match(head, body, text, settings, progress)
            counts = {k: count(matches, k) for k in range(1, settings.max_drafts + 1)}
            cases.append(Case(name, head_name, counts, case_costs(weights, head_name, settings)))
    return text, cases


def match(head: Head, body: Body, text: Continuation, settings: Settings, progress: Callable[[int], None]) -> Any:
    """Drafts from every position of a continuation: right drafts before the first wrong one, numpy [B, new_tokens - 1]."""
    import numpy as np
    import torch

    depth, found = settings.max_drafts, []
    ahead = torch.arange(settings.new_tokens - 1, device=body.device)
    for first in range(0, len(text.tokens), PROMPTS_AT_ONCE):
        part = slice(first, first + PROMPTS_AT_ONCE)
        tokens, hidden = text.tokens[part], text.hidden[part]
        positions = (text.start - 1 + ahead).expand(len(tokens), -1)
        drafts = draft(head, body, tokens, hidden, positions, depth)
        targets = positions[..., None] + 2 + torch.arange(depth, device=body.device)
        right = tokens.gather(1, targets.flatten(1)).view_as(drafts)
        found.append(leading_matches(drafts.cpu().numpy(), right.cpu().numpy()))
        progress(len(tokens))
    return np.concatenate(found)


def open_body(weights: Weights, device: str) -> LayerwiseBody:
    """The body of a checkpoint, with as many layers as fit kept on the device."""
    import gc

    import torch

    from quantize.machine import available_memory_bytes
    from quantize.streaming.decoder import Decoder

    gc.collect()  # the body before this one: modules and their hooks refer to each other
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
    decoder = Decoder(weights.architecture, device)
    lm_head = weights.lm_head()
    free = torch.cuda.mem_get_info()[0] - RESERVE_BYTES if device.startswith("cuda") else available_memory_bytes() // 2
    head_bytes = sum(2 * math.prod(shape) for shape in weights.architecture.mtp_tensors.values())
    return LayerwiseBody(
        weights.architecture,
        decoder,
        lambda index: weights.layer(decoder, index),
        weights.embedding(),
        weights.final_norm(),
        lm_head,
        keep_bytes=max(0, free - lm_head.nbytes - head_bytes),
    )


def _read_head(weights: Weights | None) -> tuple[dict[str, Any], str | None, list[str]]:
    """A head's tensors, what keeps it from drafting, and the names that are absent. No tensors where names are absent."""
    if weights is None:
        return {}, "there is no checkpoint", []
    absent = absent_tensors(weights.architecture, weights.checkpoint)
    tensors = {} if absent else weights.mtp_tensors()
    try:
        check_complete(weights.architecture, tensors, absent)
    except HeadError as error:
        return tensors, str(error), absent
    return tensors, None, absent


def _tried(body: str, sound: Mapping[str, Mapping[str, Any]], settings: Settings) -> dict[str, Mapping[str, Any]]:
    """Which heads are tried on a body, the best first: it helps to make the text."""
    source, own = sound.get("source"), sound.get("checkpoint")
    best = source or own or {}
    tried: dict[str, Mapping[str, Any]] = {}
    if body == "quantized" and source and own and inspect_head(own, source):
        tried = {"source's": source, "its own": own}
    elif body == "bf16" or own:
        tried = {"BF16": best}
    return tried | {form: cast_head(best, form) for form in settings.casts}


def case_costs(weights: Weights, head: str, settings: Settings) -> Costs:
    """What a draft costs on a body with a head: what the user gave, or from the bytes that are read."""
    known = costs(weights.checkpoint, weights.architecture, BYTES.get(head, 1.0))
    if settings.draft_cost is None and settings.verify_cost is None:
        return known
    draft_cost = known.draft if settings.draft_cost is None else settings.draft_cost
    verify_cost = known.verify if settings.verify_cost is None else settings.verify_cost
    return Costs(draft_cost, verify_cost, "as given")


def _agreement(texts: Mapping[str, Continuation]) -> dict[str, Any] | None:
    """How far the bodies' greedy texts agree: prompts that are equal, and the mean number of tokens before they differ."""
    if len(texts) < 2:
        return None
    one, other = texts["bf16"], texts["quantized"]
    width = min(one.tokens.shape[1], other.tokens.shape[1])
    same = (one.tokens[:, :width].cpu() == other.tokens[:, :width].cpu()).long().cumprod(dim=1).sum(dim=1)
    alike = (same - one.start).clamp(max=one.num_tokens)
    return {
        "equal_prompts": int((alike == one.num_tokens).sum()),
        "mean_tokens_until_they_differ": round(float(alike.float().mean()), 1),
    }


__all__ = ["Settings", "evaluate_mtp", "markdown", "print_result"]
