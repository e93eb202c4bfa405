"""Means over tasks and their intervals."""

import math
import random
from itertools import combinations
from statistics import fmean

import pytest

from agentfly.evaluation.summary import Estimate, pass_at_k


@pytest.mark.parametrize(
    ("chains", "successes", "k"), [(4, 1, 2), (6, 3, 4), (8, 0, 4), (8, 8, 1), (5, 4, 2), (3, 2, 3)]
)
def test_pass_at_k_equals_enumeration(chains: int, successes: int, k: int) -> None:
    chosen = list(combinations([True] * successes + [False] * (chains - successes), k))
    assert pass_at_k(k, chains, successes) == pytest.approx(sum(map(any, chosen)) / len(chosen))


def test_one_chain_per_task_gets_the_wilson_interval() -> None:
    estimate = Estimate.from_proportions([1.0] * 7 + [0.0] * 3, chains=1)
    assert estimate.mean == 0.7
    assert (estimate.low, estimate.high) == pytest.approx((0.39677, 0.89220), abs=1e-4)  # the textbook's, for 7 of 10


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_interval_has_width_if_all_tasks_agree(share: float) -> None:
    estimate = Estimate.from_proportions([share] * 20, chains=4)
    assert estimate.mean == share
    assert 0.1 < estimate.high - estimate.low < 0.2
    assert 0 <= estimate.low <= share <= estimate.high <= 1


def test_interval_accounts_for_correlation_within_tasks() -> None:
    def width(shares: list[float], chains: int) -> float:
        estimate = Estimate.from_proportions(shares, chains)
        return estimate.high - estimate.low

    agree = [1.0, 0.0] * 10
    assert width(agree, 8) == pytest.approx(width(agree, 1))
    assert width([0.75, 0.25] * 10, 8) < width(agree, 1)
    assert width([0.5, 0.50001] * 10, 4) == pytest.approx(width([1.0, 0.0] * 40, 1), rel=1e-3)  # one a chain at most


@pytest.mark.parametrize("binary", [True, False])
def test_interval_coverage_is_nominal(binary: bool) -> None:
    drawn, held = random.Random(0), 0
    for _ in range(600):
        skills = [drawn.betavariate(1, 1) for _ in range(40)]
        tasks = [[float(drawn.random() < skill) for _ in range(4)] for skill in skills]
        means = [fmean(task) * (1 if binary else 10) for task in tasks]
        estimate = Estimate.from_proportions(means, 4) if binary else Estimate.from_values(means)
        held += estimate.low <= (0.5 if binary else 5) <= estimate.high
    assert 0.92 <= held / 600 <= 0.98


def test_too_few_tasks_give_no_interval() -> None:
    assert math.isnan(Estimate.from_values([]).mean)
    assert str(Estimate.from_values([])) == "–"
    alone = Estimate.from_values([2.5])
    assert (alone.mean, math.isnan(alone.low)) == (2.5, True)
    assert alone.to_json() == [2.5, None, None]
    assert str(Estimate.from_values([1.0, 2.0])).startswith("1.500 (0.520 – ")
