"""The family's classes in transformers, by name: for the parts that are put together here and not by transformers."""

import importlib
from typing import Any

from assemble.architecture import MOE, Architecture


def text_config(architecture: Architecture, **changes: Any) -> Any:
    """transformers' config of the decoder, with some fields changed."""
    from transformers import CONFIG_MAPPING

    text = {key: value for key, value in architecture.text.items() if key != "model_type"}
    config = CONFIG_MAPPING[f"{architecture.model_type}_text"](**text | changes)
    config._attn_implementation = "sdpa"
    config._experts_implementation = "eager"
    return config


def family_class(architecture: Architecture, name: str) -> Any:
    """A class of the family: `DecoderLayer`, `RMSNorm`, `TextRotaryEmbedding`."""
    family = architecture.model_type
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    return getattr(modeling, f"{'Qwen3_5Moe' if family == MOE else 'Qwen3_5'}{name}")
