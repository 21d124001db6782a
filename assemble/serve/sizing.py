"""How long a request may be: the profile's wish against what `assemble.fit` says the cards hold."""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from assemble.errors import InputError
from assemble.fit import Cards, Fit, ServeSettings, fit
from assemble.serve.described import Described
from assemble.serve.extra import Given
from recipes.serve_profile import ServeProfile, Variable

CONTEXT = "--max-model-len"
ROUND_TOKENS = 256  # a context that is not the user's own is a multiple of this
# vLLM does not start when its pool holds less than the longest request. The arithmetic is at most 5 % above the pools measured
# on 16, 32 and 48 GB cards (docs/memory.md), so a context that is chosen here stays below it by more.
RESERVE = 0.08
WORKSPACE = "VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE"


@dataclass(frozen=True)
class Sized:
    """The outcome.

    Attributes:
        given: The flags, with the context filled in.
        context: Tokens of the longest request.
        fit: The memory arithmetic of these flags.
        refused: Why it does not fit; empty when it does.
        notes: What was decided.
    """

    given: tuple[Given, ...]
    context: int
    fit: Fit
    refused: str
    notes: tuple[str, ...]


def size(
    checkpoint: Described,
    cards: Cards,
    profile: ServeProfile,
    given: Sequence[Given],
    variables: Sequence[Variable],
    vllm: str,
    asked: int | None,
) -> Sized:
    """Chooses the context.

    Args:
        checkpoint: The checkpoint.
        cards: The cards.
        profile: The profile.
        given: Every flag; the context is still the profile's, or the user's.
        variables: Every environment variable.
        vllm: vLLM's version.
        asked: The context that the user asked for, if any: it is kept or refused, never changed.
    """
    settings = settings_of(given, variables, vllm)
    if asked is None and settings.max_model_len != profile.context.tokens:
        asked = settings.max_model_len  # given as a flag of vLLM's own
    limit = checkpoint.context_limit
    wanted = asked or min(profile.context.tokens, limit)
    found = fit(checkpoint.model, cards, dataclasses.replace(settings, max_model_len=wanted))
    context, note = _chosen(profile, found, wanted, asked, limit)
    if context not in (0, wanted):
        found = fit(checkpoint.model, cards, dataclasses.replace(settings, max_model_len=context))
    return Sized(
        tuple(dataclasses.replace(flag, values=(str(context),)) if flag.name == CONTEXT else flag for flag in given),
        context,
        found,
        _refused(profile, found, context, asked, limit),
        (note,),
    )


def _chosen(profile: ServeProfile, found: Fit, wanted: int, asked: int | None, limit: int) -> tuple[int, str]:
    """The context, and a sentence about it."""
    if asked is not None:
        return asked, f"context {asked:,} tokens, as asked"
    holds = found.max_context if found.max_context < limit else max(limit, found.pool_tokens)
    safe = min(limit, int(holds * (1 - RESERVE)))
    if found.max_context < wanted:
        context = _rounded(safe)
        return (
            context,
            f"context lowered from the profile's {wanted:,} tokens to {context:,}: the KV pool holds that with some reserve",
        )
    if wanted < profile.context.tokens:
        return wanted, f"context {wanted:,} tokens, what the model was made for; the profile's is {profile.context.tokens:,}"
    raised = _rounded(min(limit, safe))
    if profile.context.raise_to_pool and raised > wanted:
        return raised, f"context raised from the profile's {wanted:,} tokens to {raised:,}: the KV pool holds it"
    near = (
        f" The pool holds little more; should vLLM refuse to start, give --context {_rounded(safe)}." if safe < wanted else ""
    )
    return wanted, f"context {wanted:,} tokens: {profile.context.reason}.{near}"


def _rounded(tokens: int) -> int:
    return tokens // ROUND_TOKENS * ROUND_TOKENS or tokens


def _refused(profile: ServeProfile, found: Fit, context: int, asked: int | None, limit: int) -> str:
    if asked is not None and asked > limit:
        return f"{asked:,} tokens of context are more than the {limit:,} that the model was made for."
    least = min(profile.context.least, limit)
    if asked is None and context < least:
        why = found.reason.rstrip(".") or f"only {context:,} tokens of context would be left"
        return f"{why}; the profile needs {least:,} tokens of context at least."
    return "" if found.fits else found.reason


def settings_of(given: Sequence[Given], variables: Sequence[Variable], vllm: str) -> ServeSettings:
    """The flags that decide about memory, as `assemble.fit` takes them.

    Raises:
        InputError: a value that is no number, or JSON that is none.
    """
    kinds = {field.name: field.type for field in dataclasses.fields(ServeSettings)}
    found: dict[str, Any] = {"vllm": vllm}
    for flag in given:
        field, on = flag.name.removeprefix("--").replace("-", "_"), True
        if field.startswith("no_"):
            field, on = field.removeprefix("no_"), False
        if flag.name == "--enforce-eager":
            found["cudagraph_mode"] = "NONE"
        elif field in ("speculative_config", "compilation_config"):
            found |= _inside(flag, kinds)
        elif field in kinds:
            found[field] = _value(flag, str(kinds[field]), on=on)
    for variable in variables:
        if variable.name == WORKSPACE:
            found["flashinfer_workspace_bytes"] = int(variable.value)
    return ServeSettings(**found)


def _inside(flag: Given, kinds: dict[str, Any]) -> dict[str, Any]:
    """What a flag whose value is JSON says about memory."""
    try:
        value = json.loads(flag.values[0])
    except (ValueError, IndexError) as error:
        raise InputError(f"{flag.name} must be given a JSON object") from error
    if not isinstance(value, dict):
        raise InputError(f"{flag.name} must be given a JSON object, found {flag.values[0]!r}")
    return {name: entry for name, entry in value.items() if name in kinds}


def _value(flag: Given, kind: str, *, on: bool) -> Any:
    if "bool" in kind:
        return on
    if len(flag.values) != 1:
        raise InputError(f"{flag.name} takes one value, found {len(flag.values)}")
    text = flag.values[0]
    try:
        return float(text) if "float" in kind else int(text) if "int" in kind else text
    except ValueError as error:
        raise InputError(f"{flag.name} must be a number, found {text!r}") from error
