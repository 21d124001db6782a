"""Counting what is accepted, and what pays."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from assemble.architecture import read_architecture
from assemble.checkpoint import Checkpoint
from quantize.evaluate.mtp_acceptance import Acceptance, Costs, best, costs, count, leading_matches
from quantize.evaluate.tasks.proportion import wilson


def serve(matches: list[int], num_drafts: int) -> tuple[int, list[int], int]:
    """A server in slow motion: steps, accepted by position, tokens emitted."""
    steps, accepted, emitted = 0, [0] * num_drafts, 1
    while emitted < len(matches) + 1:
        steps += 1
        right = matches[emitted - 1]
        for position in range(num_drafts):
            if position >= right:
                break
            accepted[position] += 1
            emitted += 1
        emitted += 1
    return steps, accepted, emitted


@given(st.lists(st.lists(st.integers(0, 6), min_size=5, max_size=5), min_size=1, max_size=4), st.integers(1, 6))
def test_the_walk_is_that_of_a_server(rows: list[list[int]], num_drafts: int) -> None:
    found = count(np.array(rows), num_drafts)
    served = [serve(row, num_drafts) for row in rows]
    assert found.steps == sum(steps for steps, _, _ in served)
    assert list(found.accepted_by_position) == [sum(a[i] for _, a, _ in served) for i in range(num_drafts)]
    emitted = sum(tokens - 1 for _, _, tokens in served)  # the first token of each came with the prompt
    assert found.tokens_per_step == pytest.approx(emitted / found.steps)
    assert found.drafted == found.steps * num_drafts
    assert found.low <= found.tokens_per_step <= found.high
    assert all(earlier >= later for earlier, later in zip(found.rates, found.rates[1:], strict=False))


def test_drafts_count_up_to_the_first_wrong_one() -> None:
    drafts = np.array([[[1, 2, 3], [1, 9, 3], [9, 2, 3]]])
    assert leading_matches(drafts, np.array([[[1, 2, 3]]])).tolist() == [[3, 1, 0]]


def accepting(*tokens: float) -> dict[int, Acceptance]:
    return {k: Acceptance(k, 1, (0,) * k, value, value, value) for k, value in enumerate(tokens, 1)}


def test_the_number_of_drafts_that_pays() -> None:
    """Free drafts: the more the better. Dear ones: none. In between, and with verification that costs as well."""
    measured = accepting(1.8, 2.4, 2.8, 3.0)
    assert best(measured, Costs(0.0)) == (4, 3.0)
    assert best(measured, Costs(1.0)) == (0, 1.0)
    k, speedup = best(measured, Costs(0.2))
    assert (k, round(speedup, 4)) == (3, 1.75)
    assert best(measured, Costs(0.1, 0.1)) == (k, speedup)


@pytest.mark.parametrize("moe", [False, True])
def test_costs_are_bytes_read(moe: bool, tiny: Path, tiny_moe: Path) -> None:
    """By hand: the head and lm_head, beside the layers and lm_head; of eight experts two are read for a token."""
    checkpoint = Checkpoint.open(tiny_moe if moe else tiny)
    found = costs(checkpoint, read_architecture(checkpoint.config, checkpoint))
    size = {name: t.nbytes * (2 / 8 if ".mlp.experts." in name else 1) for name, t in checkpoint.items()}
    head = sum(n for name, n in size.items() if name.startswith("mtp."))
    lm_head = size["lm_head.weight"]
    layers = sum(n for name, n in size.items() if ".layers." in name and not name.startswith("mtp."))
    body = layers + lm_head + size["model.language_model.norm.weight"]
    experts = sum(n for name, n in size.items() if ".mlp.experts." in name and not name.startswith("mtp."))
    assert found.draft == pytest.approx((head + lm_head) / body)
    assert found.verify == pytest.approx(experts / body)
    assert (found.verify > 0) == moe
    half = costs(checkpoint, read_architecture(checkpoint.config, checkpoint), 0.5)
    assert half.draft == pytest.approx((head / 2 + lm_head) / body)


def test_costs_do_not_depend_on_how_experts_are_stored(make_variant: Callable[..., Path]) -> None:
    found = []
    for split in (False, True):
        checkpoint = Checkpoint.open(make_variant(moe=True, split=split))
        found.append(costs(checkpoint, read_architecture(checkpoint.config, checkpoint)))
    assert found[0] == found[1]


def test_the_wilson_interval() -> None:
    """Published values (Newcombe 1998, table I, method 3), and a report's 29 of 30."""
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(15, 148) == pytest.approx((0.0624, 0.1605), abs=5e-5)
    assert wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)
    assert wilson(1, 29) == pytest.approx((0.0061, 0.1718), abs=5e-5)
    assert wilson(29, 30) == pytest.approx((0.8333, 0.9941), abs=5e-5)
    assert wilson(0, 0) == (0.0, 1.0)
