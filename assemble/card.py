"""The model card of a checkpoint: a template filled with facts from stage records. It states nothing that was not recorded."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2

from assemble.architecture import MOE, TEXT_CLASS
from assemble.formats import FP8, W4A16_NVFP4

WHAT = {
    W4A16_NVFP4: ("MLP, `lm_head`", "NVFP4, W4A16, blocks of 16"),
    FP8: ("attention, linear attention", "FP8 E4M3, W8A8, a scale a tensor"),
    "MTP head": ("MTP head", "BF16, as in the source"),
    "other": ("embedding, norms, small projections, vision tower", "as in the source"),
}


def render_card(facts: Mapping[str, Any]) -> str:
    """The card's markdown.

    Args:
        facts: Plain data from the records; see `quantize.stages.card` for its keys. The same facts give the same text.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701 - markdown, not HTML
    )
    sizes, model_type = facts["sizes"], facts["plan"]["model_type"]
    text_only = bool(facts["plan"]["text_only"])
    wide = WHAT | ({W4A16_NVFP4: ("routed and shared experts, `lm_head`", WHAT[W4A16_NVFP4][1])} if model_type == MOE else {})
    rows = [
        {"what": what, "format": form, "tensors": sizes[kind]["tensors"], "size": _gigabytes(sizes[kind]["bytes"])}
        for kind, (what, form) in wide.items()
        if kind in sizes
    ]
    return environment.get_template("card.jinja").render(
        **facts,
        rows=rows,
        total_tensors=sum(kind["tensors"] for kind in sizes.values()),
        total_size=_gigabytes(sum(kind["bytes"] for kind in sizes.values())),
        hub_model=facts["model"]["revision"] is not None,
        text_only_class=TEXT_CLASS[model_type] if text_only else None,
        moe=model_type == MOE,
        language_model_only=not text_only,
        pipeline_tag="text-generation" if text_only else "image-text-to-text",
        modelopt_recipe=facts["recipe"]["modelopt"][model_type],
    )


def _gigabytes(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.1f} MB"
