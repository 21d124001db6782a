"""The pipeline: the stages, in order. Each is data and one function; `runner.py` runs them.

evaluate, smoke and publish are optional: a checkpoint is complete without them, and its card says so.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from assemble.errors import InputError
from assemble.writer import sha256_file
from quantize.stage import Request, Stage
from quantize.stages import assemble, calibrate, card, fetch, plan, quantize, verify
from recipes.schema import Recipe


def _nothing(_recipe: Recipe) -> dict[str, object]:
    return {}


def _optional(stage: str, function: str) -> Callable[[Any], Any]:
    """A function of a stage that few runs ask for: its module is imported when it is called."""

    def imported(argument: Any) -> Any:
        return getattr(import_module(f"quantize.stages.{stage}"), function)(argument)

    return imported


def _exact(value: Any) -> Any:
    """The value with each float as its shortest text, which is exact: a fingerprint takes no floats."""
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, dict):
        return {key: _exact(inner) for key, inner in value.items()}
    return [_exact(inner) for inner in value] if isinstance(value, list) else value


def _evaluation_asked(request: Request) -> dict[str, Any]:
    """The content of the user's own text to evaluate on.

    Raises:
        InputError: it is not there.
    """
    path = request.evaluation_data
    if path is None:
        return {}
    if not path.exists():
        raise InputError(
            f"--evaluation-data {path} does not exist. Give a .jsonl, a .parquet, or a folder saved by `datasets`."
        )
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    return {"data": {p.name if p == path else str(p.relative_to(path)): sha256_file(p) for p in files}}


PIPELINE = (
    Stage("fetch", 2, (), _nothing, fetch.run, always=True),
    Stage(
        "plan",
        1,
        ("fetch",),
        lambda r: {"modelopt": dict(r.modelopt), "mtp": r.mtp.model_dump(), "max_shard_bytes": r.max_shard_bytes},
        plan.run,
        always=True,
    ),
    Stage(
        "calibrate", 1, ("fetch",), lambda r: {"calibration": r.calibration.model_dump(exclude={"batch_size"})}, calibrate.run
    ),
    Stage(
        "quantize",
        2,
        ("fetch", "plan", "calibrate"),
        lambda r: {"calibration": {"batch_size": r.calibration.batch_size}},
        quantize.run,
        resumes=True,
        settles=True,
    ),
    Stage("assemble", 2, ("fetch", "plan", "quantize"), _nothing, assemble.run),
    Stage("verify", 1, ("fetch", "assemble"), _nothing, verify.run),
    Stage(
        "evaluate",
        1,
        ("fetch", "assemble"),
        lambda r: {"evaluation": _exact(r.evaluation.model_dump(mode="json"))},
        _optional("evaluate", "run"),
        wanted=lambda request: request.evaluate,
        asked=_evaluation_asked,
        check=_optional("evaluate", "check"),
    ),
    Stage(
        "smoke",
        1,
        ("assemble",),
        lambda r: {"smoke": _exact(r.smoke.model_dump(mode="json"))},
        _optional("smoke", "run"),
        wanted=lambda request: request.smoke is not None,
        asked=lambda request: _evaluation_asked(request) | (request.smoke.identity if request.smoke else {}),
        uses=("evaluate",),
        renewed=True,
        check=_optional("smoke", "check"),
    ),
    Stage(
        "card",
        2,
        ("fetch", "plan", "calibrate", "quantize", "assemble", "verify"),
        lambda r: {"recipe": _exact(r.model_dump(mode="json"))},
        card.run,
        uses=("evaluate", "smoke"),
        renewed=True,
    ),
    Stage(
        "publish",
        1,
        ("assemble", "card"),
        _nothing,
        _optional("publish", "run"),
        always=True,
        wanted=lambda request: request.push is not None,
        released=True,
        check=_optional("publish", "check"),
    ),
)


def check(request: Request) -> list[str]:
    """Asks every stage that is wanted what it can refuse before any work.

    Returns:
        What is worth knowing, a sentence each.

    Raises:
        InputError: what would fail later.
    """
    return [note for stage in PIPELINE if stage.wanted(request) for note in stage.check(request)]
