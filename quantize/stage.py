"""What a stage is: data and one function. The runner gives it meaning; `pipeline.py` lists the stages."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from assemble.errors import InputError
from assemble.jsonfile import read_object, write_object
from quantize.console import Reporter
from quantize.fingerprint import fingerprint
from recipes.loader import LoadedRecipe
from recipes.schema import Recipe

RECORD = "stage.json"


@dataclass(frozen=True)
class Request:
    """What the user asked for. Only `recipe`, and the content of model, head and calibration data, decide bytes.

    Attributes:
        model: Directory or Hub id of the BF16 checkpoint.
        out: The checkpoint to make.
        recipe: The recipe.
        revision: Hub branch, tag or commit of `model`.
        mtp_from: Directory or Hub id of the checkpoint that the MTP head is taken from.
        calibration: A jsonl or parquet file, or a folder saved by `datasets`, in place of the recipe's dataset.
        device: `auto`, `cuda` or `cpu`.
    """

    model: str
    out: Path
    recipe: LoadedRecipe
    revision: str | None = None
    mtp_from: str | None = None
    calibration: Path | None = None
    device: str = "auto"

    @property
    def workspace(self) -> Path:
        """Where everything lives until the checkpoint is complete."""
        return self.out.with_name(self.out.name + ".run")


@dataclass(frozen=True)
class Result:
    """What a stage leaves.

    Attributes:
        outputs: Name -> SHA-256 of each output; a name is a file in the stage's folder unless the stage reads only.
        facts: What later stages, the card and `status` want to know. Plain data.
    """

    outputs: Mapping[str, str]
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Record:
    """A finished stage, as its `stage.json` holds it."""

    stage: str
    version: int
    fingerprint: str
    identity: Mapping[str, Any]
    outputs: Mapping[str, str]
    facts: Mapping[str, Any]
    provenance: Mapping[str, Any]
    seconds: float
    peak_memory_bytes: int

    def save(self, directory: Path) -> None:
        """Writes `stage.json`: the last file of a stage, since it declares the stage finished."""
        write_object(directory / RECORD, self.__dict__)


def read_record(directory: Path) -> Record | None:
    """The record of a finished stage; None when it is not finished.

    Raises:
        InputError: a stage.json that cannot be understood.
    """
    path = directory / RECORD
    if not path.is_file():
        return None
    data = read_object(path)
    try:
        return Record(**data)
    except TypeError as error:
        raise InputError(
            f"{path} is not a stage record of this version ({error}). Remove {directory.parent} to start over."
        ) from error


@dataclass(frozen=True)
class Context:
    """What a stage's function is given.

    Attributes:
        request: What the user asked for.
        directory: The stage's own folder, empty.
        records: The records of the stages it needs, by name.
        previous: Its own last record, for a stage that always runs.
        reporter: Where progress goes.
    """

    request: Request
    directory: Path
    records: Mapping[str, Record]
    previous: Record | None
    reporter: Reporter

    @property
    def recipe(self) -> Recipe:
        """The recipe."""
        return self.request.recipe.recipe

    def directory_of(self, stage: str) -> Path:
        """The folder of another stage."""
        return self.directory.parent / stage


@dataclass(frozen=True)
class Stage:
    """One step of the pipeline.

    Attributes:
        name: Also its folder's name.
        version: Raised when its bytes change for the same inputs.
        needs: Stages whose outputs it reads.
        settings: The part of the recipe that decides its bytes. Plain data.
        run: Does the work.
        always: True for a stage that is quick and reads the world outside: it runs in every run.
    """

    name: str
    version: int
    needs: tuple[str, ...]
    settings: Callable[[Recipe], Mapping[str, Any]]
    run: Callable[[Context], Result]
    always: bool = False

    def identity(self, recipe: Recipe, records: Mapping[str, Record]) -> dict[str, Any]:
        """Everything that decides this stage's bytes, as the plain data that is hashed."""
        return {
            "stage": self.name,
            "version": self.version,
            **self.settings(recipe),
            "inputs": {name: dict(records[name].outputs) for name in self.needs},
        }


def identity_fingerprint(identity: Mapping[str, Any]) -> str:
    """The fingerprint of a stage's identity."""
    return fingerprint(identity)
