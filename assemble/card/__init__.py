"""The model card of a checkpoint: a template filled with recorded facts. It states nothing that was not recorded.

The facts are the `card` of provenance.json (`assemble.provenance`): plain data, without paths, host names or times. The same
facts and name give the same text. A section whose facts are absent says that it was not done.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from assemble.architecture import MOE, TEXT_CLASS
from assemble.card.limits import limits
from assemble.card.metadata import front_matter
from assemble.card.serving import MODEL_WORD
from assemble.card.tables import estimate, gigabytes, number, share, size_rows

CARD = "README.md"
PLOT_TITLES = {
    "kl-histogram": "KL divergence, token by token",
    "layer-error": "Error of the hidden states, layer by layer",
    "acceptance": "Drafts accepted by position, and tokens a step",
}


def render_card(facts: Mapping[str, Any], name: str) -> str:
    """The card's markdown.

    Args:
        facts: As `quantize.stages.card` or `assemble.card.found` gathers them.
        name: What commands call the checkpoint: a Hub id, or a directory's name.
    """
    import jinja2  # a tenth of a second, which `quantize plan` need not wait for

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,  # noqa: S701 - markdown, not HTML
    )
    environment.filters |= {"gigabytes": gigabytes, "number": number, "share": share, "estimate": estimate}
    plan = facts["plan"]
    optional = ("model", "head", "command", "recipe", "calibration", "quantize", "packages", "assemble", "evaluate", "smoke")
    text = environment.get_template("card.jinja").render(
        dict.fromkeys(optional)
        | {
            "failures": {},
            "mended": [],
            "serve": [],
            **facts,
            "limits": limits(facts),
            "plots": _plots(facts.get("plots", ())),
            "versions": ", ".join(f"{p} {v}" for p, v in (facts.get("packages") or {}).items() if v),
            "name": name,
            "title": name.rpartition("/")[2],
            "front_matter": front_matter(facts),
            "rows": size_rows(plan["sizes"], moe=plan["model_type"] == MOE),
            "total_tensors": sum(kind["tensors"] for kind in plan["sizes"].values()),
            "total_bytes": sum(kind["bytes"] for kind in plan["sizes"].values()),
            "moe": plan["model_type"] == MOE,
            "text_only_class": TEXT_CLASS[plan["model_type"]] if plan["text_only"] else None,
        }
    )
    return _tidy(text).replace(MODEL_WORD, name)


def card_form() -> str:
    """Names the form that this version gives a card: facts recorded under another form may look otherwise when rendered."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.iterdir()):
        if path.suffix in (".jinja", ".py"):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _plots(files: Sequence[str]) -> dict[str, list[dict[str, str]]]:
    """The plots by the section that shows them, each with its title."""
    shown: dict[str, list[dict[str, str]]] = {"evaluate": [], "drafting": []}
    for file in files:
        name = file.partition("-")[2].rpartition(".")[0]
        title = PLOT_TITLES.get(name, name.replace("-", " ").replace("_", " "))
        shown["drafting" if "acceptance" in file else "evaluate"].append({"file": file, "title": title})
    return shown


def _tidy(text: str) -> str:
    """No more than one empty line in a row, and one newline at the end."""
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"
