"""Fingerprints: what decides a stage's bytes, as canonical JSON, and as one hash of it.

The hashed value is kept beside the hash, so that a difference can be shown field by field.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any


def canonical(value: Any) -> str:
    """The one text of a plain value: sorted keys, no spaces, ASCII.

    Raises:
        TypeError: something that is not a mapping with string keys, list, string, int, bool or None. Floats have no
            text that all agree on, so they are refused too.
    """
    _check(value, "value")
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def fingerprint(value: Any) -> str:
    """The SHA-256 of the canonical text, in hexadecimal."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()


def difference(old: Any, new: Any, path: str = "") -> Iterator[str]:
    """One line `path: old -> new` for each field that differs."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in sorted(old.keys() | new.keys()):
            yield from difference(old.get(key), new.get(key), f"{path}.{key}" if path else key)
    elif old != new:
        yield f"{path}: {_short(old)} -> {_short(new)}"


def _short(value: Any) -> str:
    if value is None:
        return "absent"
    text = value if isinstance(value, str) else json.dumps(value)
    is_hash = len(text) == 64 and set(text) <= set("0123456789abcdef")
    return text[:12] + "…" if is_hash else text


def _check(value: Any, path: str) -> None:
    if value is None or isinstance(value, str | bool | int):
        return
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{path}: key {key!r} is not a string")
            _check(item, f"{path}.{key}")
    elif isinstance(value, list):
        for i, item in enumerate(value):
            _check(item, f"{path}[{i}]")
    else:
        raise TypeError(f"{path}: {type(value).__name__} has no canonical text")
