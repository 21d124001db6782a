"""Adds it up: what each card holds, what is left for the cache, and what fits in that."""

import dataclasses
import functools
import math
import operator
from dataclasses import dataclass
from typing import Any

from assemble.checkpoint import Checkpoint
from assemble.errors import InputError
from assemble.fit.cache import CacheGeometry, geometry, kv_dtype, state_dtypes
from assemble.fit.cards import MIB, Cards
from assemble.fit.model import MTP_HEAD, Model, read_model
from assemble.fit.settings import GIB, ServeSettings
from assemble.fit.suggestions import Suggestion, suggest
from assemble.fit.terms import Term, budget_terms, outside_terms

AGENTS_SHARE = 0.5  # of the pool: room for contexts to grow between turns, and for each agent's prefix to stay cached
NEVER_CHANGED = {"max_lora_rank", "num_speculative_tokens"}  # by a remedy: the adapter's own rank, and what was asked to draft
UNCERTAIN = 300 * MIB  # the fitted terms are known to about this; less room than this is called tight


class FitError(InputError):
    """A model that cannot be split over this many cards."""


@dataclass(frozen=True)
class Fit:
    """What one card of `cards` holds, and what the cache has room for.

    Attributes:
        model: The checkpoint.
        cards: What it is served on.
        settings: How, every None filled in.
        terms: What takes memory, inside vLLM's budget and outside of it.
        geometry: How the cache is paged.
        asked: The settings as they were given.
    """

    model: Model
    cards: Cards
    settings: ServeSettings
    terms: tuple[Term, ...]
    geometry: CacheGeometry
    asked: ServeSettings

    @property
    def budget_bytes(self) -> int:
        """What vLLM allows itself: the card's CUDA total times the utilization."""
        return math.ceil(self.cards.card.usable_bytes * self.settings.gpu_memory_utilization)

    @property
    def pool_bytes(self) -> int:
        """What is left of the budget for the cache; negative when the rest alone is too large."""
        return self.budget_bytes - sum(term.nbytes for term in self.terms if term.inside_budget)

    @property
    def outside_bytes(self) -> int:
        """What is taken outside the budget."""
        return sum(term.nbytes for term in self.terms if not term.inside_budget)

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return max(0, self.pool_bytes // self.geometry.block_bytes)

    @property
    def _usable_blocks(self) -> int:
        return self.num_blocks - (1 if self.settings.behaviour.reserves_null_block else 0)

    @property
    def max_model_len(self) -> int:
        """The longest request asked for."""
        return self.settings.max_model_len or self.model.max_len

    @property
    def needed_bytes(self) -> int:
        """What the cache must have for vLLM to start: one request of max_model_len, and a block for every request."""
        null = 1 if self.settings.behaviour.reserves_null_block else 0
        blocks = self.geometry.blocks(self.max_model_len) + null
        return max(blocks, self._blocks_for_graphs) * self.geometry.block_bytes

    @property
    def _blocks_for_graphs(self) -> int:
        """vLLM 0.20 to 0.32 config/compilation.py: full graphs of a model with states need a block for every request."""
        full = self.settings.cudagraph_mode not in ("NONE", "PIECEWISE") and self.geometry.linear_layers
        return (self.settings.max_num_seqs or 1) if full else 0

    @property
    def slack_bytes(self) -> int:
        """What is left when vLLM has started, negative by what is short: in the budget or, if that is less, on the card."""
        on_card = self.cards.card.usable_bytes - self.budget_bytes - self.outside_bytes
        return min(self.pool_bytes - self.needed_bytes, on_card)

    @property
    def fits(self) -> bool:
        """Whether vLLM starts with these settings and survives its first request."""
        return self.slack_bytes >= 0

    @property
    def tight(self) -> bool:
        """Whether it fits by less, or misses by less, than the fitted terms are known to."""
        return abs(self.slack_bytes) < UNCERTAIN

    @property
    def reason(self) -> str:
        """What is short and by how much; empty when it fits."""
        if self.fits:
            return ""
        pool, block = self.pool_bytes, self.geometry.block_bytes
        if pool < 0:
            return f"No memory is left for the cache: the rest takes {-pool / GIB:.2f} GiB a card more than the budget has."
        if self._usable_blocks < self.geometry.blocks(self.max_model_len):
            need = self.geometry.blocks(self.max_model_len) * block
            return (
                f"A request of {self.max_model_len:,} tokens needs {need / GIB:.2f} GiB of cache a card, and there are "
                f"{pool / GIB:.2f}: {self.max_context:,} tokens fit."
            )
        if self.num_blocks < self._blocks_for_graphs:
            return (
                f"--max-num-seqs {self.settings.max_num_seqs} is more than the cache's {self.num_blocks} blocks: vLLM refuses "
                "to capture CUDA graphs (each decoding request needs a block for its state)."
            )
        return (
            f"{self.outside_bytes / MIB:.0f} MiB are taken outside the budget, and utilization "
            f"{self.settings.gpu_memory_utilization} leaves {(self.cards.card.usable_bytes - self.budget_bytes) / MIB:.0f}: "
            "the first request runs out of memory."
        )

    @property
    def max_context(self) -> int:
        """The longest single request that fits, the model's own maximum at most."""
        return self.geometry.longest(self._usable_blocks, self.model.max_len)

    @property
    def pool_tokens(self) -> int:
        """The tokens of "GPU KV cache size" in vLLM's log: it depends on max_model_len, see `assemble.fit.cache`."""
        return int(self.concurrency(self.max_model_len) * self.max_model_len)

    @property
    def block_tokens(self) -> int:
        """The tokens of "Setting attention block size to" in vLLM's log."""
        return self.geometry.block_tokens

    @property
    def kv_bytes_per_token(self) -> int:
        """KV of one token in all decoder layers, a card."""
        return self.geometry.kv_bytes_per_token

    @property
    def weights_bytes(self) -> int:
        """Weights on a card, the MTP head's included when it drafts."""
        return sum(term.nbytes for term in self.terms if term.weights)

    def concurrency(self, context: int) -> float:
        """How many requests of `context` tokens the pool holds at once."""
        return self.num_blocks / self.geometry.blocks(context)

    def agents(self, mean_context: int) -> float:
        """The field report's rule: half of the pool over the mean context. It comes out high: 34 for a measured 24."""
        return AGENTS_SHARE * self.pool_tokens / mean_context

    @functools.cached_property
    def suggestions(self) -> tuple[Suggestion, ...]:
        """What would give the cache more room, mildest first."""
        return suggest(self.settings, self.model, self.slack_bytes, self._with)

    @functools.cached_property
    def remedy(self) -> "Fit | None":
        """The mildest suggestions that together make it fit, with what was asked for left alone; None when none do.

        None, too, when it fits already.
        """
        current, applied = self, list[dict[str, Any]]()
        while not current.fits:
            allowed = [s for s in current.suggestions if not self._asked_for(s)]
            if not allowed:
                return None
            applied.append(dict(allowed[0].changes))
            current = current._with(allowed[0].settings)
        for changes in reversed(applied[:-1]):  # what turned out not to be needed, the costliest first
            kept = [each for each in applied if each is not changes]
            without = self._with(dataclasses.replace(self.settings, **functools.reduce(operator.or_, kept, {})))
            if without.fits:
                current, applied = without, kept
        return current if applied else None

    def _asked_for(self, suggestion: Suggestion) -> bool:
        """Whether a suggestion would change what the user gave, or takes away what is served."""
        default = ServeSettings()
        given = {f.name for f in dataclasses.fields(default) if getattr(self.asked, f.name) != getattr(default, f.name)}
        return bool((given | NEVER_CHANGED) & set(suggestion.changes))

    def _with(self, settings: ServeSettings) -> "Fit":
        return _fit(self.model, self.cards, settings)

    def as_json(self) -> dict[str, Any]:
        """Everything as plain data; bytes are a card's."""
        card = self.cards.card
        kv, (conv, recurrent) = kv_dtype(self.model, self.settings), state_dtypes(self.model, self.settings)
        names = (
            "fits", "tight", "reason", "budget_bytes", "outside_bytes", "weights_bytes", "pool_bytes", "needed_bytes",
            "slack_bytes", "num_blocks", "pool_tokens", "max_context", "block_tokens", "kv_bytes_per_token",
        )  # fmt: skip
        return {
            "checkpoint": self.model.name,
            "cards": {"count": self.cards.count, **dataclasses.asdict(card)},
            "settings": dataclasses.asdict(self.settings),
            "dtypes": {"kv": kv, "conv_state": conv, "recurrent_state": recurrent},
            **{name: getattr(self, name) for name in names},
            "bytes_per_token_at_max_model_len": self.geometry.bytes_per_token(self.max_model_len),
            "concurrency_at_max_model_len": self.concurrency(self.max_model_len),
            "cache": dataclasses.asdict(self.geometry)
            | {
                "page_bytes": self.geometry.page_bytes,
                "block_bytes": self.geometry.block_bytes,
                "state_blocks": self.geometry.state_blocks,
            },
            "terms": [dataclasses.asdict(term) for term in self.terms],
            "suggestions": [
                {"text": s.text, "flag": s.flag, "frees_bytes": s.frees_bytes, "settings": dataclasses.asdict(s.settings)}
                for s in self.suggestions
            ],
            "remedy": dataclasses.asdict(self.remedy.settings) if self.remedy else None,
        }


def fit(checkpoint: Checkpoint | Model, cards: Cards, settings: ServeSettings | None = None) -> Fit:
    """Estimates what a checkpoint takes on these cards. Nothing is read but the headers and config that it holds already.

    Args:
        checkpoint: A checkpoint, or what `read_model` made of it.
        cards: What it is to be served on, split over all of them.
        settings: How; vLLM's defaults without.

    Raises:
        FitError: the model cannot be split over this many cards.
        SettingError: drafting is asked of a checkpoint without an MTP head.
        ConfigError: not a model of this family.
    """
    model = checkpoint if isinstance(checkpoint, Model) else read_model(checkpoint)
    return _fit(model, cards, settings or ServeSettings())


def _fit(model: Model, cards: Cards, settings: ServeSettings) -> Fit:
    _check(model, cards, settings)
    filled = settings.filled(cards.card, model.max_len)
    cache = geometry(model, filled, cards.count)
    terms = (*budget_terms(model, cards, filled), *outside_terms(filled))
    return Fit(model, cards, filled, terms, cache, settings)


def _check(model: Model, cards: Cards, settings: ServeSettings) -> None:
    """What vLLM asserts of a split (facts of 0.32 and 0.33), and what needs a head."""
    if settings.num_speculative_tokens and MTP_HEAD not in model.held:
        raise FitError(
            f"{model.name} has no MTP head, so it cannot draft. Put it back: python -m assemble splice --head-from SOURCE "
            f"{model.name}; or leave --mtp out."
        )
    tp, kv = cards.count, model.number("num_key_value_heads")
    divided = ["num_attention_heads"]
    if model.linear_layers:
        divided += ["linear_num_key_heads", "linear_num_value_heads"]
    divided += ["moe_intermediate_size"] if model.architecture.moe else ["intermediate_size"]
    wrong = [(key, model.number(key)) for key in divided if model.number(key) % tp]
    if kv % tp and tp % kv:
        wrong.append(("num_key_value_heads", kv))
    if wrong:
        key, value = wrong[0]
        raise FitError(f"{model.name} cannot be split over {tp} cards: {key} is {value}. Use 1, 2, 4 or 8.")
