"""Two ways a text shows that something is broken: numbers that are none, and repetition without end."""

import math
from collections.abc import Sequence

from quantize.smoke.passes import Output

RUN = 24  # the same token this often in a row: no language does that, NaN logits do ('!!!!' is token 0 of this family)
LOOP_SHARE = 0.9  # of the last half of a text made of one short phrase, again and again
LONGEST_PHRASE = 8  # tokens
SHORTEST = 32  # tokens that a text must have to be called a loop


def num_not_numbers(outputs: Sequence[Output]) -> int:
    """Generated tokens whose log probability, or a candidate's, is not a number."""
    return sum(
        math.isnan(step.logprob) or any(math.isnan(value) for value in step.candidates.values())
        for output in outputs
        for step in output.steps
    )


def longest_run(tokens: Sequence[int]) -> int:
    """The length of the longest run of one token."""
    longest = run = 0
    previous: int | None = None
    for token in tokens:
        run = run + 1 if token == previous else 1
        longest, previous = max(longest, run), token
    return longest


def stuck(tokens: Sequence[int]) -> bool:
    """Whether one token is repeated as no text does."""
    return longest_run(tokens) >= RUN


def loops(tokens: Sequence[int]) -> bool:
    """Whether the last half is one phrase of at most eight tokens, again and again. Small and base models do that by nature."""
    if len(tokens) < SHORTEST:
        return False
    tail = list(tokens[len(tokens) // 2 :])
    for period in range(1, LONGEST_PHRASE + 1):
        same = sum(a == b for a, b in zip(tail, tail[period:], strict=False))
        if same >= LOOP_SHARE * (len(tail) - period):
            return True
    return False
