"""What to change when it does not fit, mildest first, and how much each frees."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from assemble.fit.cache import kv_dtype, state_dtypes
from assemble.fit.model import VISION, Model
from assemble.fit.settings import LORA_RANKS, ServeSettings

SMALL_WORKSPACE = 64 * 1024 * 1024  # the field report's
SAFE_UTILIZATION = 0.94  # above it 16 GB cards ran out of memory at the first request


class Measured(Protocol):
    """What a suggestion is judged by."""

    @property
    def slack_bytes(self) -> int:
        """What is left when vLLM has started."""
        ...

    @property
    def max_context(self) -> int:
        """The longest request."""
        ...


@dataclass(frozen=True)
class Suggestion:
    """One change.

    Attributes:
        text: What it costs, in a sentence.
        flag: What to write on `vllm serve`'s command line, or the environment variable.
        frees_bytes: What it frees on a card, or what the longest request then needs less.
        settings: The settings with it applied.
        changes: What it changes in them.
    """

    text: str
    flag: str
    frees_bytes: int
    settings: ServeSettings
    changes: Mapping[str, Any]


@dataclass(frozen=True)
class _Idea:
    flag: str
    text: str
    changes: dict[str, Any]


def suggest(
    settings: ServeSettings, model: Model, slack_bytes: int, fitted: Callable[[ServeSettings], Measured]
) -> tuple[Suggestion, ...]:
    """The changes that free anything, mildest first.

    Args:
        settings: The settings now, filled.
        model: The model.
        slack_bytes: What is left with them; negative when it does not fit.
        fitted: Estimates other settings.
    """
    found = list(_helpful(_ideas(settings, model), settings, slack_bytes, fitted))
    if slack_bytes < 0:
        found += _helpful(_shorter(settings, fitted), settings, slack_bytes, fitted)
    return (*found, *_helpful(_costly_ideas(settings), settings, slack_bytes, fitted))


def _helpful(
    ideas: Iterable[_Idea], settings: ServeSettings, slack_bytes: int, fitted: Callable[[ServeSettings], Measured]
) -> Iterator[Suggestion]:
    for idea in ideas:
        changed = dataclasses.replace(settings, **idea.changes)
        frees = fitted(changed).slack_bytes - slack_bytes
        if frees > 0:
            yield Suggestion(idea.text, idea.flag, frees, changed, idea.changes)


def _ideas(s: ServeSettings, model: Model) -> Iterator[_Idea]:
    """In the order in which a person should try them: free, then cheap, then what costs something."""
    if not s.language_model_only and VISION in model.held:
        yield _Idea("--language-model-only", "no images: the vision tower is not loaded", {"language_model_only": True})
    if kv_dtype(model, s) == "bfloat16":
        text = "halves the bytes of each cached token; no measured loss in the field reports"
        yield _Idea("--kv-cache-dtype fp8", text, {"kv_cache_dtype": "fp8"})
    if state_dtypes(model, s)[1] == "float32" and model.linear_layers:
        text = "halves the recurrent states; output was bit-identical in the field report"
        flag = "--mamba-cache-dtype bfloat16 --mamba-ssm-cache-dtype bfloat16"
        yield _Idea(flag, text, {"mamba_cache_dtype": "bfloat16", "mamba_ssm_cache_dtype": "bfloat16"})
    if (s.flashinfer_workspace_bytes or 0) > SMALL_WORKSPACE:
        text = "a smaller attention workspace; harmless at low concurrency"
        flag = f"VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE={SMALL_WORKSPACE} (environment)"
        yield _Idea(flag, text, {"flashinfer_workspace_bytes": SMALL_WORKSPACE})
    yield from _batch_ideas(s, 32, 2048)
    if s.gpu_memory_utilization != SAFE_UTILIZATION:
        less = s.gpu_memory_utilization < SAFE_UTILIZATION
        text = (
            "a larger share of the card, if nothing else runs on it" if less else "leaves room for what is outside the budget"
        )
        yield _Idea(f"--gpu-memory-utilization {SAFE_UTILIZATION}", text, {"gpu_memory_utilization": SAFE_UTILIZATION})
    yield from _batch_ideas(s, 8, 1024)


def _batch_ideas(s: ServeSettings, seqs: int, tokens: int) -> Iterator[_Idea]:
    if (s.max_num_seqs or 1) > seqs:
        text = f"at most {seqs} requests at a time: fewer logits to sample and fewer CUDA graphs"
        changes = {"max_num_seqs": seqs, "max_cudagraph_capture_size": None}
        yield _Idea(f"--max-num-seqs {seqs}", text, changes)
    if (s.max_num_batched_tokens or 1) > tokens:
        text = "smaller steps of prefill: a lower peak, and a later first token of long prompts"
        yield _Idea(f"--max-num-batched-tokens {tokens}", text, {"max_num_batched_tokens": tokens})


def _costly_ideas(s: ServeSettings) -> Iterator[_Idea]:
    yield from _batch_ideas(s, 3, 512)
    if s.enable_prefix_caching:
        text = "one state less a request; a conversation is then read again at every turn"
        yield _Idea("--no-enable-prefix-caching", text, {"enable_prefix_caching": False})
    if s.max_lora_rank > LORA_RANKS[1]:
        smaller = max(rank for rank in LORA_RANKS if rank < s.max_lora_rank)
        text = "if the adapter's own rank allows it; or serve the base alone, or the adapter merged"
        yield _Idea(f"--max-lora-rank {smaller}", text, {"max_lora_rank": smaller})
    if s.num_speculative_tokens:
        text = "no draft head, no cache of its own, no states for drafts; single streams become slower"
        yield _Idea("without --speculative-config", text, {"num_speculative_tokens": 0})
    if s.cudagraph_mode not in ("NONE", "PIECEWISE"):
        text = "no full CUDA graphs: decoding loses some speed"
        yield _Idea('--compilation-config \'{"cudagraph_mode":"PIECEWISE"}\'', text, {"cudagraph_mode": "PIECEWISE"})


def _shorter(s: ServeSettings, fitted: Callable[[ServeSettings], Measured]) -> Iterator[_Idea]:
    """A shorter max_model_len."""
    longest = fitted(s).max_context
    if 0 < longest < (s.max_model_len or 0):
        text = "the longest request that fits as it is"
        yield _Idea(f"--max-model-len {longest}", text, {"max_model_len": longest})
