"""The pipeline: the stages, in order. Each is data and one function; `runner.py` runs them."""

from quantize.stage import Stage
from quantize.stages import assemble, calibrate, card, fetch, plan, quantize, verify
from recipes.schema import Recipe


def _nothing(_recipe: Recipe) -> dict[str, object]:
    return {}


PIPELINE = (
    Stage("fetch", 1, (), _nothing, fetch.run, always=True),
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
        1,
        ("fetch", "plan", "calibrate"),
        lambda r: {"calibration": {"batch_size": r.calibration.batch_size}},
        quantize.run,
    ),
    Stage("assemble", 1, ("fetch", "plan", "quantize"), _nothing, assemble.run),
    Stage("verify", 1, ("fetch", "assemble"), _nothing, verify.run),
    Stage(
        "card",
        1,
        ("fetch", "plan", "calibrate", "quantize", "assemble", "verify"),
        lambda r: {"recipe": r.model_dump(mode="json")},
        card.run,
    ),
)
