"""Finds, reads and checks serve profiles, and what differs between versions of vLLM."""

import functools
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from recipes.errors import RecipeError
from recipes.loader import explain, nearest
from recipes.serve_profile import Flags, ServeProfile, VersionFacts
from recipes.yaml_text import read_mapping

SHIPPED = Path(__file__).parent / "serve"
Data = TypeVar("Data", bound=BaseModel)


class ProfileError(RecipeError):
    """A serve profile that cannot be found, read or understood."""


def shipped_profiles() -> list[str]:
    """The names of the profiles that come with the package, sorted."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def load_profile(name_or_path: str) -> tuple[str, ServeProfile]:
    """Reads a shipped profile by name, or a YAML file by path, with its shared part merged in.

    Returns:
        The profile's name, and the profile.

    Raises:
        ProfileError: unknown name, unreadable or broken YAML, unknown or misspelt key, wrong value.
    """
    path = _find(name_or_path)
    profile = _read(path, ServeProfile)
    base = SHIPPED / "base" / f"{profile.base}.yaml"
    if not base.is_file():
        there = ", ".join(sorted(p.stem for p in base.parent.glob("*.yaml")))
        raise ProfileError(f"profile {path}: there is no base {profile.base!r}. There are: {there}.")
    shared = _read(base, Flags)
    merged = {
        part: (*_not_in(getattr(shared, part), own := getattr(profile, part)), *own)
        for part in ("flags", "environment", "left_out")
    }
    return path.stem, profile.model_copy(update=merged)


@functools.cache
def version_facts() -> VersionFacts:
    """What differs between versions of vLLM."""
    return _read(SHIPPED / "versions" / "vllm.yaml", VersionFacts)


def _not_in(shared: tuple[Any, ...], own: tuple[Any, ...]) -> list[Any]:
    """The shared entries that a profile does not say otherwise, in their order."""
    said = {_without_no(entry.name) for entry in own}
    return [entry for entry in shared if _without_no(entry.name) not in said]


def _without_no(name: str) -> str:
    """`--no-enable-x` and `--enable-x` are one flag."""
    return name.replace("--no-", "--", 1)


def _find(name_or_path: str) -> Path:
    if name_or_path in shipped_profiles():
        return SHIPPED / f"{name_or_path}.yaml"
    path = Path(name_or_path)
    if path.suffix in {".yaml", ".yml"}:
        if path.is_file():
            return path
        raise ProfileError(f"profile file {path} does not exist")
    near = nearest(name_or_path, shipped_profiles(), cutoff=0.4)
    raise ProfileError(
        f"no serve profile named {name_or_path!r}{f'; did you mean {near}?' if near else '.'} Shipped: "
        f"{', '.join(shipped_profiles())}. A profile of your own is given as a path that ends in .yaml."
    )


def _read(path: Path, schema: type[Data]) -> Data:
    _, data = read_mapping(path, "profile", ProfileError)
    try:
        return schema.model_validate(data)
    except ValidationError as error:
        raise ProfileError(f"profile {path}: " + "; ".join(explain(e, schema) for e in error.errors())) from error
