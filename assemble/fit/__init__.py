"""What fits where: the memory of a served checkpoint, term by term, without a GPU.

    from assemble.fit import ServeSettings, fit, parse_cards
    found = fit(Checkpoint.open(path), parse_cards("2x16GB"), ServeSettings(max_model_len=150_000, num_speculative_tokens=4))
    found.fits, found.pool_tokens, found.terms

Weights and cache are exact arithmetic over the checkpoint's headers and vLLM's own page layout; activations are computed and
scaled; CUDA graphs and the runtime are constants fitted to published measurements (assemble/fit/overhead.py names the points).
docs/memory.md sets it against every number that the two field reports give.
"""

from assemble.fit.cards import KNOWN_CARDS, Card, CardError, Cards, parse_cards
from assemble.fit.estimate import Fit, FitError, fit
from assemble.fit.model import Model, read_model
from assemble.fit.settings import ServeSettings, SettingError
from assemble.fit.suggestions import Suggestion
from assemble.fit.terms import Term

__all__ = [
    "KNOWN_CARDS", "Card", "CardError", "Cards", "Fit", "FitError", "Model", "ServeSettings", "SettingError", "Suggestion",
    "Term", "fit", "parse_cards", "read_model",
]  # fmt: skip
