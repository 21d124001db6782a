"""The card's metadata: what the Hub reads of it, and what is taken over from the base model's card."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

TAKEN = ("license", "license_name", "license_link", "language", "pipeline_tag")  # huggingface_hub's ModelCardData fields
TAGS = ("nvfp4", "fp8", "modelopt", "mtp", "speculative-decoding")
CARD_LIMIT = 5_000_000  # bytes of a card that are read


def base_metadata(root: Path) -> dict[str, Any]:
    """What a base model's README.md says of license, language and task; empty where it says nothing that can be read."""
    import yaml
    from huggingface_hub import metadata_load

    path = root / "README.md"
    if not path.is_file() or path.stat().st_size > CARD_LIMIT:
        return {}
    try:
        data = metadata_load(path) or {}
    except (ValueError, yaml.YAMLError):
        return {}
    return {key: data[key] for key in TAKEN if isinstance(data.get(key), str | list)}


def front_matter(facts: Mapping[str, Any]) -> str:
    """The YAML block at the card's top, without its `---` lines.

    The license link of a base model that is a path in its repository becomes an address.
    """
    from huggingface_hub import ModelCardData

    model = facts.get("model") or {}
    base = dict(model.get("metadata") or {})
    on_hub = model.get("revision") is not None
    if on_hub and "license_link" in base and "://" not in base["license_link"]:
        base["license_link"] = f"https://huggingface.co/{model['name']}/blob/main/{base['license_link']}"
    base.setdefault("pipeline_tag", "text-generation" if facts["plan"]["text_only"] else "image-text-to-text")
    relation = {"base_model": model["name"], "base_model_relation": "quantized"} if on_hub else {}
    return str(ModelCardData(**base, **relation, library_name="vllm", tags=list(TAGS)).to_yaml()).strip()
