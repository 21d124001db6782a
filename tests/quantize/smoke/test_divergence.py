"""Where two texts part, and by how much the runs disagree there."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantize.smoke.divergence import compare
from quantize.smoke.passes import Output, Step

TEXTS = st.lists(st.integers(0, 9), min_size=1, max_size=40)


def output(tokens: list[int], shift: float = 0.0, prompt: tuple[int, ...] = (1, 2)) -> Output:
    """Each token at -0.5 + shift, each other digit at -3."""
    steps = tuple(Step(t, -0.5 + shift, {**dict.fromkeys(range(10), -3.0), t: -0.5 + shift}) for t in tokens)
    return Output(prompt, tuple(tokens), "", "length", steps)


@given(TEXTS)
def test_a_text_is_the_same_as_itself(tokens: list[int]) -> None:
    comparison = compare([output(tokens)], [output(tokens)])
    assert (comparison.same, comparison.differences, comparison.noise) == (1, (), 0.0)


@given(TEXTS, st.data())
def test_the_first_difference_is_found_and_what_follows_says_nothing(tokens: list[int], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(tokens) - 1))
    other = [*tokens[:at], (tokens[at] + 1) % 10, *data.draw(st.lists(st.integers(0, 9), max_size=5))]
    (difference,) = compare([output(tokens)], [output(other)]).differences
    assert (difference.position, difference.plain, difference.drafted) == (at, tokens[at], (tokens[at] + 1) % 10)
    assert difference.disagreement == pytest.approx(5.0)  # each run puts its own 2.5 nats above the other's


def test_noise_is_taken_from_what_both_runs_share() -> None:
    assert compare([output([1, 2, 3])], [output([1, 2, 9], shift=0.25)]).noise == pytest.approx(0.25)


def test_a_text_that_stops_short_diverges() -> None:
    comparison = compare([output([1, 2, 3])], [output([1, 2])])
    assert [d.disagreement for d in comparison.differences] == [math.inf]
    assert comparison.diverged(1e9)


def test_a_margin_that_is_no_number_diverges() -> None:
    broken = Output((1, 2), (4,), "", "length", (Step(4, math.nan, {4: math.nan, 3: -1.0}),))
    assert compare([output([3])], [broken]).diverged(100.0)


def test_other_prompts_are_refused() -> None:
    with pytest.raises(ValueError, match="same prompts"):
        compare([output([1])], [output([1], prompt=(9,))])
