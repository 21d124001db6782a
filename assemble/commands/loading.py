"""The commands by name. One is imported when it is asked for: `serve` need not wait for what only `card` uses."""

import importlib
from collections.abc import Iterator, Mapping
from typing import Any

import typer
from typer.core import TyperGroup

PLACES = {
    "verify": "verifying",
    "rules": "verifying",
    "splice": "mending",
    "repair": "mending",
    "diff": "comparing",
    "fit": "fitting",
    "card": "publishing",
    "publish": "publishing",
    "serve": "serving",
    "profiles": "serving",
}  # command -> the module beside this one that has `COMMAND_command`; in the order of --help


class Commands(Mapping[str, Any]):
    """Name -> command, each made of its function when it is looked up."""

    def __getitem__(self, name: str) -> Any:
        module = importlib.import_module(f"assemble.commands.{PLACES[name]}")
        alone = typer.Typer(add_completion=False)
        alone.command(name)(getattr(module, f"{name}_command"))
        return typer.main.get_command(alone)

    def __iter__(self) -> Iterator[str]:
        return iter(PLACES)

    def __len__(self) -> int:
        return len(PLACES)


class LoadingGroup(TyperGroup):
    """A group whose commands are `Commands`."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes | {"commands": Commands()})
