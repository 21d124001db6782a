"""Repairs of `ignore`: it names what is unquantized, whole, and nothing that is packed."""

from assemble.architecture import EXPERT, VISION_PREFIX, experts_container, fused_group
from assemble.config import MTP_IGNORE
from assemble.mend.configs import QUANTIZATION
from assemble.mend.draft import Draft
from assemble.mend.found import CONFIG
from assemble.plan import natural
from assemble.resolution import PartialGroupError, Resolution
from assemble.rules.ignore import any_match, caught_by_accident


def ignore_sound(draft: Draft) -> None:
    """`ignore` hits no packed module, names fused groups whole, and covers the head; absent in both files, it is made anew."""
    q = draft.config[QUANTIZATION]
    value = q.get("ignore")
    where = f"{CONFIG}: {QUANTIZATION}.ignore"
    if not isinstance(value, list):
        other = draft.twin_quantization.get("exclude_modules")
        q["ignore"] = list(other) if isinstance(other, list) and other else _canonical(draft)
        draft.mend(where, "absent" if value is None else repr(value), f"{len(q['ignore'])} entries")
    entries = [e for e in q["ignore"] if isinstance(e, str)]
    entries = _without_hits(draft, entries, where)
    entries = _meaningful(draft, entries, where)
    entries = _whole_groups(draft, entries, where)
    if not set(MTP_IGNORE) & set(entries):
        draft.mend(where, "no entry for the MTP head", ", ".join(MTP_IGNORE))
        entries = [*entries, *(e for e in MTP_IGNORE if e not in entries)]
    entries = _with_experts(draft, entries, where)
    if set(entries) - set(map(str, q["ignore"])) and set(entries) == set(_canonical(draft)):
        entries = _canonical(draft)  # what was added goes to its place
    q["ignore"] = entries


def _canonical(draft: Draft) -> list[str]:
    """As `assemble.config.ignore_list` makes it for a new checkpoint."""
    entries = [m for m in draft.architecture.linear_modules if draft.scheme(m) is None and ".mlp.experts." not in m]
    entries += [n.removesuffix(".weight") for n in draft.tensors if n.endswith(".conv1d.weight")]
    tower = [VISION_PREFIX.rstrip(".") + "*"] if draft.architecture.wrapped else []
    return [*sorted(entries, key=natural), *tower, *MTP_IGNORE]


def _without_hits(draft: Draft, entries: list[str], where: str) -> list[str]:
    wrapped = draft.architecture.wrapped
    names = Resolution({}, wrapped=wrapped)
    prefixes = {names.prefix_of(module): module for module in draft.config[QUANTIZATION]["quantized_layers"]}
    kept = []
    for entry in entries:
        alone = Resolution({"ignore": [entry]}, wrapped=wrapped)
        if hits := [module for prefix, module in prefixes.items() if _hits(alone, prefix)]:
            draft.mend(where, f"{entry!r} excludes {len(hits)} packed modules, {hits[0]} among them", "taken out")
        else:
            kept.append(entry)
    return kept


def _hits(alone: Resolution, prefix: str) -> bool:
    try:
        return alone.excluded(prefix)
    except PartialGroupError:  # a member of a packed fused group by its full name
        return True


def _meaningful(draft: Draft, entries: list[str], where: str) -> list[str]:
    """Without the entries that name nothing, or that vLLM, which matches substrings, takes for more than they name."""
    linear = draft.architecture.linear_modules
    modules = [*linear, *(n.removesuffix(".weight") for n in draft.tensors if n.endswith(".weight"))]
    parents = {".".join(parts[:i]) for m in modules for parts in [m.split(".")] for i in range(1, len(parts) + 1)}
    ordered = sorted(parents)
    resolution = Resolution({}, wrapped=draft.architecture.wrapped)
    built = {resolution.prefix_of(m): m for m in linear}
    kept = []
    for entry in entries:
        if entry not in parents and entry not in MTP_IGNORE and not any_match(entry, ordered):
            draft.mend(where, f"{entry!r} names no module", "taken out")
        elif over := caught_by_accident(resolution, entry, built):
            draft.mend(where, f"{entry!r} also hits {over}", "taken out")
        else:
            kept.append(entry)
    return kept


def _with_experts(draft: Draft, entries: list[str], where: str) -> list[str]:
    """Unquantized experts beside a quantized shared expert are named: vLLM gives unlisted ones what is listed beside them."""
    listed = draft.config[QUANTIZATION]["quantized_layers"]
    containers = dict.fromkeys(experts_container(m) for m in draft.modules if EXPERT.search(m))
    for container in containers:
        inherits = any(m.startswith(container.removesuffix("experts")) for m in listed)
        if container not in listed and inherits and container not in entries:
            draft.mend(where, f"{container} is unquantized, and a module beside it is not", "added")
            entries = [container, *entries]
    return entries


def _whole_groups(draft: Draft, entries: list[str], where: str) -> list[str]:
    """Only full names can name a part of a fused group, so it is enough to look for siblings of listed names."""
    listed = set(entries)
    for entry in entries:
        group = fused_group(entry)
        absent = [m for m in group if m not in listed and m in draft.architecture.linear_modules]
        if absent:
            draft.mend(where, f"{entry} without {' '.join(absent)}: vLLM raises on a part of a fused group", "added")
            listed |= set(absent)
            entries = [*entries, *absent]
    return entries
