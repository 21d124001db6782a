"""Limits of a recipe."""

import pytest

from quantize.errors import CheckFailedError
from quantize.evaluate.gates import Gate, check, judge
from recipes.schema import Evaluation

QUALITY = {"kl_mean": 0.02, "kl_p99": 0.1, "nll_increase": 0.03, "top1_agreement": 0.94}


def test_nothing_asked_nothing_judged() -> None:
    assert judge(Evaluation(), QUALITY, 2.4, 5) == []


def test_each_limit_both_ways() -> None:
    kept = Evaluation(
        max_kl=0.02, max_kl_p99=0.2, max_nll_increase=0.05, min_agreement=0.9, min_tokens_per_step=2.4, max_outliers=0
    )
    assert all(gate.passed for gate in judge(kept, QUALITY, 2.4, 0))
    broken = Evaluation(
        max_kl=0.01, max_kl_p99=0.05, max_nll_increase=0.01, min_agreement=0.95, min_tokens_per_step=2.5, max_outliers=0
    )
    judged = judge(broken, QUALITY, 2.4, 1)
    assert [gate.name for gate in judged if not gate.passed] == [gate.name for gate in judged]
    assert len(judged) == 6


def test_what_was_not_measured_is_not_kept() -> None:
    gates = judge(Evaluation(min_tokens_per_step=1.5), QUALITY, None, 0)
    with pytest.raises(CheckFailedError, match=r"min_tokens_per_step is 1\.5, found nothing: it was not measured.*report\.md"):
        check(gates, "report.md")


def test_not_a_number_is_not_kept() -> None:
    assert not Gate("max_kl", 0.1, float("nan")).passed
    assert not Gate("min_agreement", 0.1, float("nan")).passed


def test_the_error_names_every_limit() -> None:
    with pytest.raises(CheckFailedError, match=r"max_kl is 0\.01, found 0\.02; max_outliers is 0, found 3"):
        check(judge(Evaluation(max_kl=0.01, max_outliers=0), QUALITY, None, 3), "here")
    check(judge(Evaluation(max_kl=1.0), QUALITY, None, 3), "here")
