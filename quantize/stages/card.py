"""card: the model card and the provenance, from the records of the stages before. Facts that no record holds are not in it."""

import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from assemble.card import CARD, card_form, render_card
from assemble.card.serving import serve_entries
from assemble.provenance import FORMAT, PROVENANCE, provenance_text
from assemble.wholefile import write_whole
from assemble.writer import sha256_file
from quantize.stage import Context, Request, Result
from quantize.stages import fetch
from recipes.loader import shipped_names

PLOTS = (".png", ".svg")
PREFIX = {"evaluate": "evaluation", "smoke": "smoke"}


def run(context: Context) -> Result:
    """Writes README.md, provenance.json and the plots, each under its name only when it is whole."""
    directory, records = context.directory, context.records
    plots = _copy_plots(context)
    facts = _facts(context, sorted(plots))
    write_whole(directory / CARD, render_card(facts, context.request.out.name))
    files = {**records["assemble"].outputs, **plots, CARD: sha256_file(directory / CARD)}
    write_whole(directory / PROVENANCE, provenance_text(_provenance(context, facts, files)))
    return Result({name: sha256_file(directory / name) for name in (CARD, PROVENANCE)} | plots)


def _facts(context: Context, plots: list[str]) -> dict[str, Any]:
    records, recipe = context.records, context.request.recipe
    source, _ = fetch.opened(records["fetch"])
    model, head = records["fetch"].facts["model"], records["fetch"].facts["head"]
    plan, quantized, made = dict(records["plan"].facts), records["quantize"], records["assemble"].facts
    plan = {key: plan[key] for key in ("counts", "sizes", "config_changes", "model_type", "text_only")}
    return {
        "model": {key: model.get(key) for key in ("name", "revision", "metadata")},
        "head": {key: head.get(key) for key in ("name", "revision")} if head else None,
        "plan": plan | {"source_bytes": sum(t.nbytes for t in source.values()), "kv_fp8": True},
        "recipe": {
            "name": recipe.name,
            "description": context.recipe.description,
            "modelopt": {str(k): v for k, v in context.recipe.modelopt.items()}[plan["model_type"]],
            "text": recipe.text,
        },
        "command": _command(context.request, model, head),
        "calibration": dict(records["calibrate"].facts),
        "quantize": {"device": quantized.facts["device"], "gpu": quantized.facts.get("gpu")},
        "packages": quantized.provenance["packages"],
        "assemble": {"copied_tensors": made["copied_tensors"], "head_tensors": len(made["head_sha256"])},
        "verify": {"deep": True, **{key: records["verify"].facts[key] for key in ("rules", "warnings")}},
        "serve": serve_entries(context.checkpoint),
        "evaluate": _facts_of(context, "evaluate"),
        "smoke": _facts_of(context, "smoke"),
        "failures": _public(dict(context.failures), _private_places(context)),
        "plots": plots,
    }


def _facts_of(context: Context, stage: str) -> dict[str, Any] | None:
    record = context.records.get(stage)
    if record is None:
        return None
    facts: dict[str, Any] = _public(dict(record.facts), _private_places(context))
    facts.pop("publish", None)
    return facts


def _private_places(context: Context) -> list[str]:
    """Paths of this machine, longest first: none of them may come into a card."""
    source, head = fetch.opened(context.records["fetch"])
    paths = [context.request.workspace, context.request.out, source.root, head.root]
    places = {str(form) for path in paths for form in (path.absolute(), path.resolve())} | {str(Path.home()), str(Path.cwd())}
    return sorted(places - {"/"}, key=len, reverse=True)


def _public(value: Any, places: list[str]) -> Any:
    """Plain data with every path of this machine cut down to `…`."""
    if isinstance(value, str):
        for place in places:
            value = value.replace(place, "…")
        return value
    if isinstance(value, Mapping):
        return {key: _public(inner, places) for key, inner in value.items()}
    return [_public(inner, places) for inner in value] if isinstance(value, list | tuple) else value


def _provenance(context: Context, facts: Mapping[str, Any], files: Mapping[str, str]) -> dict[str, Any]:
    records, recipe = context.records, context.request.recipe
    return {
        "format": FORMAT,
        "name": context.request.out.name,
        "model": {key: facts["model"][key] for key in ("name", "revision")},
        "head": facts["head"],
        "recipe": {"name": recipe.name, **context.recipe.model_dump(mode="json")},
        "inputs": dict(records["fetch"].outputs),
        "stages": {
            name: {
                "version": record.version,
                "fingerprint": record.fingerprint,
                "outputs": dict(record.outputs),
                "seconds": record.seconds,
                "gpu": record.provenance["gpu"],
                "git_commit": record.provenance["git_commit"],
                "packages": record.provenance["packages"],
            }
            for name, record in records.items()
        },
        "card_form": card_form(),
        "card": dict(facts),
        "files": dict(sorted(files.items())),
    }


def _command(request: Request, model: Mapping[str, Any], head: Mapping[str, Any] | None) -> str:
    """The command that makes the checkpoint again, with public names in the place of paths."""
    recipe = request.recipe.name
    words = ["python", "-m", "quantize", "run", model["name"], request.out.name]
    words += ["--recipe", recipe if recipe in shipped_names() else f"{recipe}.yaml"]
    words += ["--revision", model["revision"]] if model["revision"] else []
    words += ["--mtp-from", head["name"]] if head else []
    words += ["--calibration", request.calibration.name] if request.calibration else []
    return shlex.join(words)


def _copy_plots(context: Context) -> dict[str, str]:
    """Copies what the optional stages want to be beside the card; returns the names there and their digests."""
    copied: dict[str, str] = {}
    for stage, prefix in PREFIX.items():
        record = context.records.get(stage)
        names = record.facts.get("publish", [n for n in record.outputs if n.endswith(PLOTS)]) if record else []
        for name in names:
            new = context.directory / f"{prefix}-{name}"
            temporary = new.with_name(new.name + ".tmp")
            shutil.copyfile(context.directory_of(stage) / name, temporary)
            temporary.replace(new)
            copied[new.name] = sha256_file(new)
    return copied
