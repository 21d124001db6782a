"""Rules about `ignore`: vLLM matches an entry in three ways, and any hit takes a module out of the quantization."""

import re
from bisect import bisect_left
from collections.abc import Iterator
from fnmatch import translate

from assemble.architecture import fused_group
from assemble.resolution import MixedGroupError, PartialGroupError, Resolution, split_wildcard
from assemble.rules.model import Detail, Served, Severity
from assemble.rules.subject import Subject


def ignore_covers_mtp(subject: Subject) -> Iterator[Detail]:
    """IGN-1: `ignore` names the whole MTP head: `mtp*`, or `mtp.fc` and `mtp.layers.0*`."""
    if not subject.has_head or subject.plainly_unquantized:
        return
    for module in ("mtp.fc", "mtp.layers.0.self_attn.o_proj"):
        if not _excluded(subject.resolution, module):
            fatal = subject.plain is not None and module != "mtp.fc"
            severity, served = (Severity.ERROR, Served.LOUD) if fatal else (None, None)
            yield Detail("ignore", f"no entry for {module}", "'mtp*'", severity, served)


def _excluded(resolution: Resolution, module: str) -> bool:
    try:
        return resolution.excluded(resolution.prefix_of(module))
    except PartialGroupError:
        return False


def ignore_spares_the_quantized(subject: Subject) -> Iterator[Detail]:
    """IGN-2: no entry of `ignore` matches a listed module or its fused parent, by any of vLLM's three matchers."""
    if subject.plain:
        return  # what is excluded is not meant to be quantized; Q-4 sees what is stored
    lost: dict[str, str] = {}
    for module in subject.modules:
        lost.setdefault(subject.resolution.prefix_of(module), module)
    lost = {prefix: module for prefix, module in lost.items() if _excluded(subject.resolution, module)}
    if not lost:
        return
    blamed: set[str] = set()
    for entry in dict.fromkeys(subject.ignore):
        alone = Resolution({"ignore": [entry]}, wrapped=subject.resolution.wrapped)
        hit = [prefix for prefix, module in lost.items() if _excluded(alone, module)]
        blamed.update(hit)
        if hit:
            yield Detail(
                f"ignore entry {entry!r}", f"takes out {len(hit)} quantized modules, {lost[hit[0]]} among them", "none"
            )
    for prefix in lost.keys() - blamed:
        yield Detail("ignore", f"lists all members of the quantized {prefix}", "none of them")


def ignore_groups_whole(subject: Subject) -> Iterator[Detail]:
    """IGN-3: `ignore` names all members of a fused group, or none; `quantized_layers` gives them one algorithm."""
    seen: set[str] = set()
    for module in subject.linear:
        prefix = subject.resolution.prefix_of(module)
        if prefix in seen:
            continue
        seen.add(prefix)
        try:
            subject.resolution.built(module)
        except PartialGroupError as error:
            yield Detail(f"ignore, for {module}", f"some members of {error}", "all members of the fused group, or none")
        except MixedGroupError:
            continue  # Q-5's


def entries_mean_what_they_say(subject: Subject) -> Iterator[Detail]:
    """IGN-4: every entry of `ignore` matches a module, under the checkpoint's names, and none that it does not name whole."""
    names = [*subject.linear, *(n.removesuffix(".weight") for n in subject.tensors if n.endswith(".weight"))]
    modules = list(dict.fromkeys(names))
    parents: set[str] = set()
    for module in modules:
        while module and module not in parents:
            parents.add(module)
            module = module.rpartition(".")[0]  # noqa: PLW2901 - up to the top, or to one that was seen
    ordered = sorted(parents)
    built = {subject.resolution.prefix_of(m): m for m in subject.linear}
    for entry in dict.fromkeys(subject.ignore):
        if entry not in parents and not any_match(entry, ordered):
            yield Detail(f"ignore entry {entry!r}", "matches no module of the checkpoint", "a module's full name, or prefix.*")
        elif over := caught_by_accident(subject.resolution, entry, built):
            text = f"also hits {over}, as vLLM matches substrings"
            yield Detail(f"ignore entry {entry!r}", text, "a module's full name, or prefix.*")


def any_match(entry: str, names: list[str]) -> bool:
    """Whether the glob `entry` matches one of the sorted `names`."""
    stem = entry.removesuffix("*")
    if entry != stem and not any(c in stem for c in "*?["):
        place = bisect_left(names, stem)
        return place < len(names) and names[place].startswith(stem)
    if not any(c in entry for c in "*?["):
        return False
    pattern = re.compile(translate(entry))
    return any(pattern.match(name) for name in names)


def caught_by_accident(resolution: Resolution, entry: str, built: dict[str, str]) -> str | None:
    """A module whose name contains `entry`, cut inside a word or a number: `layers.1` in `layers.10`."""
    glob = any(c in entry for c in "*?[")
    for part in split_wildcard(entry):
        text = resolution.rename(part)
        for prefix, module in built.items():
            start = prefix.find(text)
            if start < 0 or entry in fused_group(module):
                continue
            before, after = prefix[:start][-1:], prefix[start + len(text) :][:1]
            number = text[-1:].isdigit() and after.isdigit()
            word = not glob and (before not in ("", ".") or after not in ("", "."))
            if number or word:
                return module
    return None
