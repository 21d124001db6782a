"""What a command line depends on in a checkpoint: read from headers and configs, in well under a second."""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assemble.architecture import Architecture, ConfigError
from assemble.checkpoint import Checkpoint, CheckpointError, read_json
from assemble.fit import Model, read_model
from assemble.jsonfile import JSONFileError
from assemble.provenance import PROVENANCE
from assemble.reader import Reader
from assemble.resolution import MixedGroupError, PartialGroupError, kv_cache_dtype
from assemble.rules.reading import read_subject
from assemble.rules.subject import QUANTIZED_DTYPES, Subject
from assemble.rules.versions import Requirements, requirements

TEXT_DRAFTS_SINCE = (0, 28)  # vLLM 0.28.0 config/speculative.py hf_config_override: the head of model_type qwen3_5_text


@dataclass(frozen=True)
class Described:
    """A checkpoint to be served.

    Attributes:
        checkpoint: Its headers and config.
        architecture: What its config.json implies.
        head: Whether it has an MTP head, and whether vLLM can load that: `none`, `bf16` or `quantized`.
        experts: The format of its routed experts, `BF16` for unquantized ones; None for a dense model.
        quantized: Whether any tensor of it is.
        kv_declared: Whether config.json declares an FP8 KV cache.
        needs: vLLM's least version and the GPU's least compute capability.
        made_from: The model that it says it was made from, if it says so.
    """

    checkpoint: Checkpoint
    architecture: Architecture
    head: str
    experts: str | None
    quantized: bool
    kv_declared: bool
    needs: Requirements
    made_from: str | None

    @functools.cached_property
    def model(self) -> Model:
        """What `fit` asks about it."""
        return read_model(self.checkpoint)

    @property
    def context_limit(self) -> int:
        """Tokens that the model was made for (`max_position_embeddings`)."""
        value = self.architecture.text.get("max_position_embeddings")
        return value if type(value) is int and value > 0 else 262_144  # the family's

    def least_vllm(self, *, drafts: bool) -> tuple[tuple[int, int], str]:
        """The least version that serves it, and why."""
        if drafts and not self.architecture.wrapped and self.needs.vllm < TEXT_DRAFTS_SINCE:
            return TEXT_DRAFTS_SINCE, "the MTP head of a text-only class"
        return self.needs.vllm, self.needs.reason


def describe(root: Path, reader: Reader | None = None) -> Described:
    """Reads what a command line depends on.

    Args:
        root: The checkpoint's directory, or a mirror of one on the Hub.
        reader: Reads values, as for `verify`.

    Raises:
        CheckpointError: its files do not hold together.
        ConfigError: not a model of this family.
    """
    subject = read_subject(root, reader=reader)
    if isinstance(subject.known, ConfigError):
        raise subject.known
    if subject.layout.problems:
        first = subject.layout.problems[0]
        raise CheckpointError(f"{first.where}: {first.text}. `python -m assemble verify` says more.")
    checkpoint = Checkpoint(root, subject.config, subject.tensors, subject.layout.shards)
    return Described(
        checkpoint,
        subject.known,
        _head(subject),
        _experts(subject),
        any(t.dtype in QUANTIZED_DTYPES for t in subject.tensors.values()),
        kv_cache_dtype(subject.quantization).startswith("fp8"),
        requirements(subject),
        _made_from(root),
    )


def _head(subject: Subject) -> str:
    if not subject.has_head:
        return "none"
    return "quantized" if any(t.dtype in QUANTIZED_DTYPES for t in subject.head_tensors) else "bf16"


def _experts(subject: Subject) -> str | None:
    """What vLLM builds the first layer's first expert with."""
    if not subject.architecture.moe:
        return None
    try:
        return subject.resolution.built(f"{subject.architecture.prefix}layers.0.mlp.experts.0.gate_proj") or "BF16"
    except (PartialGroupError, MixedGroupError):
        return "BF16"


def _made_from(root: Path) -> str | None:
    """The model that provenance.json names; a mirror of a repository has a hole there, which says nothing."""
    try:
        model: Any = (read_json(root, PROVENANCE) or {}).get("model")
    except JSONFileError:
        return None
    name = model.get("name") if isinstance(model, dict) else model
    return name if isinstance(name, str) else None
