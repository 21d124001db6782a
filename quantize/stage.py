"""What a stage is: data and one function. The runner gives it meaning; `pipeline.py` lists the stages."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from assemble.errors import InputError
from assemble.jsonfile import read_object, write_object
from assemble.publish.target import PushTarget
from quantize.console import Reporter
from recipes.loader import LoadedRecipe
from recipes.schema import Recipe

RECORD = "stage.json"
FAILED = "failed.json"
STARTED = "started.json"


@dataclass(frozen=True)
class SmokeTarget:
    """Where a vLLM is for the smoke test. One of the first three at most; with none, the stage looks for a vLLM itself.

    Attributes:
        python: The interpreter of an environment that has vLLM.
        image: A Docker image.
        endpoint: The address of a server that serves the checkpoint already.
        tensor_parallel_size: The number of GPUs that vLLM is to use. A server has its own.
        engine: More of vLLM's engine arguments, as a JSON object. A server has its own.
    """

    python: Path | None = None
    image: str | None = None
    endpoint: str | None = None
    tensor_parallel_size: int = 1
    engine: str = "{}"

    def __post_init__(self) -> None:
        if sum(value is not None for value in (self.python, self.image, self.endpoint)) > 1:
            raise InputError("--vllm-python, --vllm-image and --vllm-endpoint exclude each other. Give one of them.")
        if self.endpoint and (self.tensor_parallel_size, self.engine) != (1, "{}"):
            raise InputError(
                "--vllm-tp and --vllm-args start a vLLM, and --vllm-endpoint asks one that runs already. Leave them out."
            )

    @property
    def identity(self) -> dict[str, str | None]:
        """The target as plain text."""
        place = {"python": str(self.python) if self.python else None, "image": self.image, "endpoint": self.endpoint}
        return place | {"tensor_parallel_size": str(self.tensor_parallel_size), "engine": self.engine}


@dataclass(frozen=True)
class Request:
    """What the user asked for. Only `recipe`, and the content of model, head and calibration data, decide bytes.

    `evaluate`, `smoke` and `push` ask for optional stages: they change the model card, and nothing else of the checkpoint.

    Attributes:
        model: Directory or Hub id of the BF16 checkpoint.
        out: The checkpoint to make.
        recipe: The recipe.
        revision: Hub branch, tag or commit of `model`.
        mtp_from: Directory or Hub id of the checkpoint that the MTP head is taken from.
        calibration: A jsonl or parquet file, or a folder saved by `datasets`, in place of the recipe's dataset.
        device: `auto`, `cuda` or `cpu`.
        evaluate: Measure the written checkpoint against the source.
        evaluation_data: A jsonl or parquet file, or a folder saved by `datasets`, in place of the recipe's text.
        smoke: Serve the checkpoint with vLLM, there.
        push: Upload the checkpoint to the Hub, there.
    """

    model: str
    out: Path
    recipe: LoadedRecipe
    revision: str | None = None
    mtp_from: str | None = None
    calibration: Path | None = None
    device: str = "auto"
    evaluate: bool = False
    evaluation_data: Path | None = None
    smoke: SmokeTarget | None = None
    push: PushTarget | None = None

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
        checkpoint: The checkpoint under test: the assembled folder, or OUT once it is there.
        failures: What checks of optional stages said that failed and did not pass since, by stage.
        reached: To be told of each of the source's files when it is first read.
    """

    request: Request
    directory: Path
    records: Mapping[str, Record]
    previous: Record | None
    reporter: Reporter
    checkpoint: Path
    failures: Mapping[str, str] = field(default_factory=dict)
    reached: Callable[[Path], None] = lambda _: None

    @property
    def recipe(self) -> Recipe:
        """The recipe."""
        return self.request.recipe.recipe

    def directory_of(self, stage: str) -> Path:
        """The folder of another stage."""
        return self.directory.parent / stage


def _always_wanted(_request: Request) -> bool:
    return True


def _nothing_asked(_request: Request) -> dict[str, Any]:
    return {}


def _nothing_to_check(_request: Request) -> list[str]:
    return []


@dataclass(frozen=True)
class Stage:
    """One step of the pipeline.

    Attributes:
        name: Also its folder's name.
        version: Raised when its bytes change for the same inputs.
        needs: Stages whose outputs it reads.
        settings: The part of the recipe that decides its bytes. Plain data.
        run: Does the work.
        always: True for a stage that is quick and reads the world outside: it runs whenever it is asked for.
        wanted: Whether the request asks for it; a stage that is always wanted is not optional.
        uses: Optional stages whose records it takes in, where they are there.
        asked: What of the request, beside the recipe, decides its record. Plain data.
        renewed: True for a stage that is made again when what it is made from changed, where others refuse. Its folder and
            record stay until the new record is written.
        resumes: True for a stage that goes on from what an unfinished run of the same identity left in its folder.
        settles: True for the stage whose record needs the hashes that `fetch` left to be made.
        released: True for a stage that works on OUT, when it is there under its name.
        check: Refuses before any work what would fail later; returns what is worth knowing, a sentence each.
    """

    name: str
    version: int
    needs: tuple[str, ...]
    settings: Callable[[Recipe], Mapping[str, Any]]
    run: Callable[[Context], Result]
    always: bool = False
    wanted: Callable[[Request], bool] = _always_wanted
    uses: tuple[str, ...] = ()
    asked: Callable[[Request], Mapping[str, Any]] = _nothing_asked
    renewed: bool = False
    resumes: bool = False
    settles: bool = False
    released: bool = False
    check: Callable[[Request], list[str]] = _nothing_to_check

    @property
    def optional(self) -> bool:
        """Whether a checkpoint is complete without it."""
        return self.wanted is not _always_wanted

    def identity(self, request: Request, records: Mapping[str, Record], failures: Mapping[str, str]) -> dict[str, Any]:
        """Everything that decides this stage's bytes, as the plain data that is hashed."""
        identity = {
            "stage": self.name,
            "version": self.version,
            **self.settings(request.recipe.recipe),
            "inputs": {name: dict(records[name].outputs) for name in self.needs},
        }
        if asked := dict(self.asked(request)):
            identity["asked"] = asked
        used = [name for name in self.uses if name in records]
        if used:
            identity["used"] = {name: {"fingerprint": records[name].fingerprint, **records[name].outputs} for name in used}
        if failed := {name: failures[name] for name in self.uses if name in failures}:
            identity["failed"] = failed
        return identity
