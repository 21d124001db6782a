"""A profile as a page: every flag and variable, when it is given, and why."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from recipes.serve_profile import Condition, Flag, LeftOut, ServeProfile, Variable
from recipes.serve_profiles import load_profile, shipped_profiles, version_facts

WORDS = {
    "{name}": "NAME",
    "{tensor_parallel}": "CARDS",
    "{context}": "TOKENS",
    "{mtp}": '\'{"method":"mtp","num_speculative_tokens":K}\'',
    "{lora_rank}": "RANK",
    "{lora_modules}": "NAME=DIR …",
}


def flag_text(entry: Any) -> str:
    """A flag or variable as it is written, with words for what is filled in."""
    value = entry.value
    if value is None:
        return str(entry.name)
    if isinstance(value, dict):
        value = "'" + json.dumps(value, separators=(",", ":")) + "'"
    return f"{entry.name}{'=' if entry.name.isupper() else ' '}{WORDS.get(str(value), value)}"


def condition_text(condition: Condition) -> str:
    """When a flag is given, in brackets; empty for always."""
    stated = condition.model_dump(exclude_none=True)
    words = {
        "vllm": "vLLM {}",
        "model": "{} models",
        "experts": "{} experts",
        "lora_experts": "adapters with {} experts",
    }
    flags = {
        "vision": ("with a vision tower", "text-only"),
        "mtp": ("MTP on", "MTP off"),
        "lora": ("with LoRA", "without LoRA"),
        "tensor_parallel": ("several cards", "one card"),
    }
    parts = [words[k].format(v) if k in words else flags[k][0 if v else 1] for k, v in stated.items()]
    return f" ({', '.join(parts)})" if parts else ""


def profile_page(name: str, profile: ServeProfile, shared: Sequence[Variable | Flag] = ()) -> str:
    """One profile as markdown; without the entries that are `shared`."""
    lines = [f"### `{name}`", "", f"{_sentence(profile.title)} Cards: {', '.join(profile.cards)}.", ""]
    lines += [f"- Context {profile.context.tokens:,} tokens: {profile.context.reason}"]
    if profile.lora:
        lines += [f"- LoRA rank {profile.lora.max_rank}: {profile.lora.reason}"]
    for draft in profile.mtp:
        lines.append(f"- MTP {draft.num_speculative_tokens or 'off'}{condition_text(draft.when)}: {draft.reason}")
    for sighting in profile.vllm.seen_on:
        pool = f"; KV pool {sighting.pool_tokens:,} tokens" if sighting.pool_tokens else ""
        lines.append(f"- Seen on vLLM {sighting.vllm}, {sighting.checkpoint}, {sighting.cards}{pool}: {sighting.seen}")
    lines += ["", "| given | why |", "|---|---|"]
    lines += _rows(entry for entry in _entries(profile) if entry not in shared)
    return "\n".join([*lines, ""])


def _entries(profile: ServeProfile) -> list[Variable | Flag]:
    return [*profile.environment, *profile.flags]


def _rows(entries: Iterable[Variable | Flag]) -> list[str]:
    return [f"| `{_cell(flag_text(e))}`{condition_text(e.when)} | {_cell(e.reason)} |" for e in entries]


def whole_page() -> str:
    """All shipped profiles, what they leave out, and what differs between versions: the part of docs/serving.md made here."""
    profiles = {name: load_profile(name)[1] for name in shipped_profiles()}
    left_out = {entry.name: entry for profile in profiles.values() for entry in profile.left_out}
    first, *others = profiles.values()
    shared = [entry for entry in _entries(first) if all(entry in _entries(other) for other in others)]
    return "\n".join(
        [
            "### What every profile gives\n",
            "\n".join(["| given | why |", "|---|---|", *_rows(shared), ""]),
            *(profile_page(name, profile, shared) for name, profile in profiles.items()),
            "### What no profile gives\n",
            left_out_page(tuple(left_out.values())),
            "### What differs between versions of vLLM\n",
            versions_page(),
        ]
    )


def left_out_page(entries: tuple[LeftOut, ...]) -> str:
    """What is left out, and why, as a markdown table."""
    rows = [f"| `{_cell(flag_text(entry))}` | {_cell(entry.reason)} |" for entry in entries]
    return "\n".join(["| left out | why |", "|---|---|", *rows, ""])


def versions_page() -> str:
    """What differs between versions of vLLM, as a markdown table."""
    rows = [
        f"| {fact.name} | `{fact.vllm}` | {_sentence(fact.fact)} {_sentence(fact.consequence)} | {fact.source} |"
        for fact in version_facts().facts
    ]
    return "\n".join(["| what | vLLM | | source |", "|---|---|---|---|", *rows, ""])


def _sentence(text: str) -> str:
    plain = text.partition(" ")[0].isalpha()  # and not a name such as qwen3_xml
    return (text[0].upper() if plain else text[0]) + text[1:].rstrip(".") + "."


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
