"""Finds, reads and checks a recipe, and says plainly what is wrong with one."""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from recipes.errors import RecipeError
from recipes.schema import Recipe
from recipes.yaml_text import read_mapping

SHIPPED = Path(__file__).parent
DEFAULT = "w4a16_nvfp4-fp8_attn-kv_fp8_cast"


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe, its name, and the text it was read from (quoted in the model card)."""

    name: str
    text: str
    recipe: Recipe


def shipped_names() -> list[str]:
    """The names of the recipes that come with the package, sorted."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def load(name_or_path: str) -> LoadedRecipe:
    """Reads a shipped recipe by name, or a YAML file by path.

    Raises:
        RecipeError: unknown name, unreadable or broken YAML, a key twice, unknown or misspelt key, wrong value.
    """
    path = _find(name_or_path)
    text, data = read_mapping(path, "recipe", RecipeError)
    try:
        return LoadedRecipe(path.stem, text, Recipe.model_validate(data))
    except ValidationError as error:
        raise RecipeError(f"recipe {path}: " + "; ".join(explain(e, Recipe) for e in error.errors())) from error


def _find(name_or_path: str) -> Path:
    shipped = SHIPPED / f"{name_or_path}.yaml"
    if name_or_path in shipped_names():
        return shipped
    path = Path(name_or_path)
    if path.suffix in {".yaml", ".yml"}:
        if path.is_file():
            return path
        raise RecipeError(f"recipe file {path} does not exist")
    near = nearest(name_or_path, shipped_names(), cutoff=0.4)
    hint = f"; did you mean {near}?" if near else ""
    raise RecipeError(
        f"no recipe named {name_or_path!r}{hint} Shipped: {', '.join(shipped_names())}. "
        "A recipe of your own is given as a path that ends in .yaml."
    )


def nearest(word: str, words: Iterable[str], cutoff: float) -> str | None:
    """The one of `words` that `word` was most likely meant to be."""
    return next(iter(difflib.get_close_matches(word, list(words), n=1, cutoff=cutoff)), None)


def explain(error: Any, schema: type[BaseModel]) -> str:
    """One of pydantic's errors in a sentence; for an unknown key of `schema`, the one that was most likely meant."""
    where = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        *parents, key = [str(part) for part in error["loc"]]
        near = nearest(key, _fields(parents, schema), cutoff=0.5)
        return f"unknown key {where!r}" + (f", did you mean {near!r}?" if near else "")
    if error["type"] == "missing":
        return f"key {where!r} is missing"
    return f"{where}: {error['msg'][0].lower()}{error['msg'][1:]} (found {error['input']!r})"


def _fields(parents: list[str], schema: type[BaseModel]) -> list[str]:
    """The keys of the part of a schema that `parents` leads to; an item's number in a list leads to the list's items."""
    model, annotation = schema, None
    for part in parents:
        if part.isdigit():
            annotation = next(iter(get_args(annotation)), None)
        else:
            annotation = model.model_fields[part].annotation if part in model.model_fields else None
            if get_args(annotation):
                continue
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        model = annotation
    return list(model.model_fields)
