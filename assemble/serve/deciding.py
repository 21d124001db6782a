"""Turns a profile and a checkpoint into one command: which flags hold, what they are filled with, what the memory allows.

The profile says what is wanted and why (`recipes.serve_profile`), the checkpoint says what it is (`assemble.serve.described`),
and `assemble.fit` says what the cards hold. Where they disagree, the checkpoint and the memory win, and a note says so.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from packaging.version import InvalidVersion, Version

from assemble.errors import InputError
from assemble.fit import Cards, Fit, parse_cards
from assemble.serve.adapter import Adapter
from assemble.serve.described import Described
from assemble.serve.extra import Given, merged
from assemble.serve.sizing import Sized, size
from recipes.serve_profile import Draft, Flag, ServeProfile, Variable, holds, in_range
from recipes.serve_profiles import version_facts


class RefusedError(Exception):
    """A checkpoint that cannot be served this way: a check failed, the input was sound. The text says what to change.

    Attributes:
        reason: Why, without what would help: a sentence.
    """

    def __init__(self, text: str, reason: str = "") -> None:
        super().__init__(text)
        self.reason = reason or text


@dataclass(frozen=True)
class Wish:
    """What the user asked for beside the checkpoint and the profile; None is the profile's.

    Attributes:
        vllm: vLLM's version.
        gpus: The cards, as `parse_cards` takes them.
        context: Tokens of the longest request.
        mtp: Drafted tokens a step; 0 is off.
        lora: False keeps adapters out where the profile serves them.
        adapters: The LoRA adapters.
        extra: Further arguments of `vllm serve`, as given.
    """

    vllm: str | None = None
    gpus: str | None = None
    context: int | None = None
    mtp: int | None = None
    lora: bool = True
    adapters: tuple[Adapter, ...] = ()
    extra: tuple[str, ...] = ()


@dataclass(frozen=True)
class Serving:
    """How a checkpoint is served.

    Attributes:
        name: The profile's name.
        profile: The profile.
        vllm: vLLM's version.
        cards: The cards.
        flags: Every flag with its text, in the order of the command line.
        environment: Every variable.
        adapters: The LoRA adapters.
        context: Tokens of the longest request.
        fit: The memory arithmetic of exactly these flags.
        notes: What was decided, one sentence each.
        warnings: What to know before it is started.
    """

    name: str
    profile: ServeProfile
    vllm: str
    cards: Cards
    flags: tuple[Given, ...]
    environment: tuple[Variable, ...]
    adapters: tuple[Adapter, ...]
    context: int
    fit: Fit
    notes: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def reasons(self) -> dict[str, str]:
        """Why each variable and flag is there, by name."""
        return {v.name: v.reason for v in self.environment} | {flag.name: flag.reason for flag in self.flags}


def decide(name: str, profile: ServeProfile, checkpoint: Described, called: str, wish: Wish) -> Serving:
    """Decides every flag.

    Args:
        name: The profile's name.
        profile: The profile.
        checkpoint: The checkpoint.
        called: What clients are to call the model.
        wish: What the user asked for.

    Raises:
        InputError: a version or cards that are none.
        RefusedError: it does not fit, or this vLLM does not serve it.
    """
    notes, warnings = list[str](), list[str]()
    cards = parse_cards(wish.gpus or profile.gpus)
    facts = _facts(checkpoint, cards, wish, lora=_lora(profile, wish))
    draft = _draft(profile, checkpoint, facts, wish, notes, warnings)
    facts |= {"mtp": draft > 0, "vllm": _version(profile, checkpoint, wish, drafts=draft > 0, notes=notes)}
    flags = [flag for flag in profile.flags if holds(flag.when, facts)]
    variables = tuple(v for v in profile.environment if holds(v.when, facts))
    filled = {
        "{name}": called,
        "{tensor_parallel}": cards.count,
        "{mtp}": {"method": "mtp", "num_speculative_tokens": draft},
        "{lora_rank}": _max_rank(profile, wish, notes) if facts["lora"] else 0,
        "{lora_modules}": [f"{adapter.name}={adapter.root}" for adapter in wish.adapters],
        "{context}": profile.context.tokens,
    }
    given = merged([_given(flag, filled) for flag in flags if flag.name != "--lora-modules" or wish.adapters], wish.extra)
    sized = size(checkpoint, cards, profile, given, variables, str(facts["vllm"]), wish.context)
    if sized.refused:
        raise RefusedError(_refusal(name, sized, checkpoint), f"does not fit: {sized.refused}")
    warnings += _disagreements(checkpoint, given, str(facts["vllm"]))
    warnings += [warning for adapter in wish.adapters for warning in adapter.warnings]
    return Serving(
        name,
        profile,
        str(facts["vllm"]),
        cards,
        sized.given,
        variables,
        wish.adapters,
        sized.context,
        sized.fit,
        (*notes, *sized.notes),
        tuple(warnings),
    )


def _facts(checkpoint: Described, cards: Cards, wish: Wish, *, lora: bool) -> dict[str, Any]:
    names = [adapter.name for adapter in wish.adapters]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InputError(f"two adapters are called {twice[0]!r}; a request names one by it")
    layouts = {adapter.experts for adapter in wish.adapters} - {None}
    if len(layouts) > 1:
        raise InputError("the adapters name routed experts in two forms, one by one and fused; vLLM serves one form at a time")
    return {
        "model": "moe" if checkpoint.architecture.moe else "dense",
        "vision": checkpoint.architecture.wrapped,
        "experts": checkpoint.experts,
        "lora": lora,
        "lora_experts": next(iter(layouts), None),
        "tensor_parallel": cards.count > 1,
    }


def _lora(profile: ServeProfile, wish: Wish) -> bool:
    if wish.adapters and not wish.lora:
        raise InputError("--no-lora and --lora contradict each other; give one of them")
    return wish.lora and bool(wish.adapters or profile.lora)


def _draft(
    profile: ServeProfile,
    checkpoint: Described,
    facts: Mapping[str, Any],
    wish: Wish,
    notes: list[str],
    warnings: list[str],
) -> int:
    """Tokens drafted a step."""
    choice = next(d for d in profile.mtp if holds(d.when, {"vllm": profile.vllm.default, "mtp": None, **facts}))
    wanted = choice.num_speculative_tokens if wish.mtp is None else wish.mtp
    if wanted and checkpoint.head != "bf16":
        mend = f"python -m assemble splice --head-from BF16_MODEL {checkpoint.checkpoint.root} puts one in"
        why = "has no MTP head" if checkpoint.head == "none" else "has a quantized MTP head, which vLLM does not load"
        warnings.append(f"the profile drafts with the MTP head, and the checkpoint {why}: served without drafts. {mend}.")
        return 0
    notes.append(_draft_note(choice, wanted, asked=wish.mtp is not None))
    return wanted


def _draft_note(choice: Draft, wanted: int, *, asked: bool) -> str:
    what = f"MTP drafts {wanted} tokens a step" if wanted else "MTP is off"
    return f"{what}, as asked" if asked else f"{what}: {choice.reason}"


def _version(profile: ServeProfile, checkpoint: Described, wish: Wish, *, drafts: bool, notes: list[str]) -> str:
    """vLLM's version: the one asked for; else the profile's; else the first one known that serves the checkpoint."""
    least, reason = checkpoint.least_vllm(drafts=drafts)
    needed = Version(".".join(map(str, least)))
    chosen = wish.vllm or profile.vllm.default
    try:
        version = Version(chosen.removeprefix("v"))
    except InvalidVersion as error:
        raise InputError(f"--vllm {chosen!r} is not a version such as {profile.vllm.default}") from error
    if wish.vllm is None and version < needed:
        later = [v for v in version_facts().read_in if Version(v) >= needed]
        if later:
            notes.append(f"vLLM {later[0]} in place of the profile's {version}, which is too old for {reason}")
            return later[0]
    if version.release < needed.release:
        raise RefusedError(f"vLLM {version} does not serve this checkpoint: {reason} needs {needed} or newer (--vllm).")
    if not in_range(str(version), profile.vllm.range):
        raise RefusedError(f"vLLM {version} is outside of the profile's range, {profile.vllm.range}.")
    return str(version)


def _max_rank(profile: ServeProfile, wish: Wish, notes: list[str]) -> int:
    """`--max-lora-rank`: the adapters' own, or what the profile sets aside when none is named yet."""
    if not wish.adapters:
        assert profile.lora is not None  # noqa: S101 - that is when LoRA is on without an adapter
        notes.append(
            f"memory is set aside for LoRA adapters of rank {profile.lora.max_rank}, and none is named: "
            "--lora NAME=DIR adds one, --no-lora gives the memory to the KV pool"
        )
        return profile.lora.max_rank
    rank = max(adapter.least_max_rank for adapter in wish.adapters)
    if len(wish.adapters) > 1:
        notes.append(
            f"{len(wish.adapters)} adapters, of which a batch holds one; `-- --max-loras {len(wish.adapters)}` lets them run "
            "side by side, and sets that much more memory aside"
        )
    if profile.lora and rank != profile.lora.max_rank:
        notes.append(f"--max-lora-rank {rank} in place of the profile's {profile.lora.max_rank}, for these adapters")
    return rank


def _given(flag: Flag, filled: Mapping[str, Any]) -> Given:
    value = filled.get(flag.value, flag.value) if isinstance(flag.value, str) else flag.value
    if value is None:
        return Given(flag.name, (), flag.reason)
    if isinstance(value, list):
        return Given(flag.name, tuple(value), flag.reason)
    text = json.dumps(value, separators=(",", ":")) if isinstance(value, dict) else str(value)
    return Given(flag.name, (text,), flag.reason)


def _refusal(name: str, sized: Sized, checkpoint: Described) -> str:
    gib = 1024**3
    ways = "".join(f"\n  {s.flag}: {s.text} (frees {s.frees_bytes / gib:.2f} GiB a card)" for s in sized.fit.suggestions[:4])
    if not checkpoint.quantized:
        ways = "\n  python -m quantize run MODEL OUT: it is not quantized, and would have about 40 % of its size" + ways
    return f"it does not fit {name}: {sized.refused}{f' What would help:{ways}' if ways else ''}"


def _disagreements(checkpoint: Described, given: tuple[Given, ...], version: str) -> list[str]:
    """What the profile takes for granted and the checkpoint is not."""
    found, names = list[str](), {flag.name for flag in given}
    kv = next((flag.values[0] for flag in given if flag.name == "--kv-cache-dtype"), "auto")
    if not checkpoint.quantized:
        found.append("the checkpoint is not quantized: it takes several times the memory, and every token reads all of it")
    if kv.startswith("fp8") and not checkpoint.kv_declared:
        found.append("config.json declares no FP8 KV cache; the flag makes it FP8, with scale 1.0 and not a calibrated one")
    if not checkpoint.architecture.wrapped:
        found.append("a text-only checkpoint: --language-model-only is not needed and left out")
    if {"--speculative-config", "--enable-prefix-caching"} <= names:
        found.append("MTP and prefix caching together corrupt the output of this family (vLLM issues 43559, 47194, 53912)")
    if version not in version_facts().read_in:
        found.append(f"the flags were not looked up in vLLM {version}; they were in {', '.join(version_facts().read_in)}")
    return found
