"""Is the text with the MTP head the text without it? Judged where the two first differ, not by equality.

The body checks every draft, so in exact arithmetic greedy text is the same with and without the head. In BF16 and FP8 it is
not: a step that checks three tokens has other matrix shapes than a step that makes one, sums are rounded in another order,
and where two candidates are nearly equal the winner changes. After that the texts are about different things, so only the
first difference says something. There both runs had the same tokens before them. Run A (plain) prefers `a` to `b` by some
margin, run B (with the head) prefers `b` to `a`; the two margins together are what the runs disagree by. A near-tie shows a
small disagreement; a wrong state (a rejected draft left in the KV cache or in a recurrent state) shows a large one, since
the runs computed different things.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from quantize.smoke.passes import Output, Step


@dataclass(frozen=True)
class Difference:
    """Where one prompt's two texts first differ.

    Attributes:
        prompt: The prompt's number.
        position: The generated token's number.
        plain: The token without the head.
        drafted: The token with it.
        disagreement: Nats between the two runs on the two candidates, at least; infinite when a number was not one.
    """

    prompt: int
    position: int
    plain: int
    drafted: int
    disagreement: float


@dataclass(frozen=True)
class Comparison:
    """All prompts' texts, compared.

    Attributes:
        prompts: How many prompts were compared.
        differences: The prompts whose texts differ, in order.
        noise: The mean absolute difference of the same token's log probability after the same tokens, in nats.
    """

    prompts: int
    differences: tuple[Difference, ...]
    noise: float

    @property
    def same(self) -> int:
        """Prompts whose text is the same to the last token."""
        return self.prompts - len(self.differences)

    def diverged(self, limit: float) -> list[Difference]:
        """Differences that are no near-ties: the runs disagree by more than `limit` nats."""
        return [d for d in self.differences if not d.disagreement <= limit]


def compare(plain: Sequence[Output], drafted: Sequence[Output]) -> Comparison:
    """Compares two passes over the same prompts.

    Raises:
        ValueError: they were not asked the same.
    """
    if [o.prompt for o in plain] != [o.prompt for o in drafted]:
        raise ValueError("the two passes were not given the same prompts")
    differences, shifts = [], []
    for number, (a, b) in enumerate(zip(plain, drafted, strict=True)):
        at = _first_difference(a.tokens, b.tokens)
        shared = len(a.tokens) if at is None else at
        shifts += [abs(x.logprob - y.logprob) for x, y in zip(a.steps[:shared], b.steps[:shared], strict=True)]
        if at is not None:
            differences.append(_difference(number, at, a, b))
    known = [shift for shift in shifts if math.isfinite(shift)]
    return Comparison(len(plain), tuple(differences), sum(known) / len(known) if known else 0.0)


def _first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    for position, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return position
    return None if len(a) == len(b) else min(len(a), len(b))


def _difference(number: int, at: int, a: Output, b: Output) -> Difference:
    if at >= len(a.steps) or at >= len(b.steps):  # one text stopped where the other went on, or no log probabilities came
        plain, drafted = (o.tokens[at] if at < len(o.tokens) else -1 for o in (a, b))
        return Difference(number, at, plain, drafted, math.inf)
    x, y = a.steps[at], b.steps[at]
    disagreement = _margin(x, y.token) + _margin(y, x.token)
    return Difference(number, at, x.token, y.token, math.inf if math.isnan(disagreement) else disagreement)


def _margin(step: Step, other: int) -> float:
    """How far a run puts its own token above another; at least so far, when the other is not among the candidates."""
    value = step.of(other)
    if value is None:
        value = min(step.candidates.values(), default=math.nan)
    return step.logprob - value
