"""card: the model card and the provenance, from the records of the stages before. Facts that no record holds are not in it."""

from typing import Any

from assemble.card import render_card
from assemble.jsonfile import write_object
from assemble.writer import sha256_file
from quantize.stage import Context, Result

CARD = "README.md"
PROVENANCE = "provenance.json"


def run(context: Context) -> Result:
    """Writes README.md and provenance.json."""
    records = context.records
    model, head = records["fetch"].facts["model"], records["fetch"].facts["head"]
    facts: dict[str, Any] = {
        "model": model,
        "head": head,
        "name": context.request.out.name,
        "recipe_name": context.request.recipe.name,
        "recipe": context.recipe.model_dump(mode="json"),
        "plan": records["plan"].facts,
        "sizes": records["plan"].facts["sizes"],
        "calibration": records["calibrate"].facts,
        "quantize": records["quantize"].facts,
        "packages": records["quantize"].provenance["packages"],
        "assemble": records["assemble"].facts,
        "verify": records["verify"].facts,
    }
    (context.directory / CARD).write_text(render_card(facts), encoding="utf-8")
    provenance = {
        "model": {"name": model["name"], "revision": model["revision"]},
        "head": {"name": head["name"], "revision": head["revision"]} if head else None,
        "recipe": {"name": context.request.recipe.name, **context.recipe.model_dump(mode="json")},
        "inputs": dict(records["fetch"].outputs),
        "stages": {
            name: {
                "version": r.version,
                "fingerprint": r.fingerprint,
                "seconds": r.seconds,
                "packages": r.provenance["packages"],
            }
            for name, r in records.items()
        },
        "files": dict(records["assemble"].outputs) | {CARD: sha256_file(context.directory / CARD)},
    }
    write_object(context.directory / PROVENANCE, provenance)
    return Result({name: sha256_file(context.directory / name) for name in (CARD, PROVENANCE)})
