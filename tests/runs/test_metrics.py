"""Metrics of chains."""

import math

import pytest

from agentfly.runs import chain_metrics
from agentfly.runs.metrics import is_uniform
from agentfly.trajectory import CallStatus, Failure, FailureKind, StopReason, TrainingTreatment
from tests.runs.chains import call, chain


def test_rewards_and_lengths() -> None:
    got = chain_metrics(
        [chain("0/0", 1.0, tokens=3), chain("0/1", 0.0, tokens=5, turns=3), chain("1/0", None, tokens=1)]
    )
    assert got["chains"] == 3
    assert (got["reward/mean"], got["reward/std"], got["reward/min"], got["reward/max"]) == (0.5, 0.5, 0, 1)
    assert got["reward/success"] == 0.5
    assert got["reward/unscored"] == pytest.approx(1 / 3)
    assert (got["chain/sampled_tokens"], got["chain/sampled_tokens_max"], got["chain/prompt_tokens"]) == (3, 5, 4)
    assert got["chain/turns"] == pytest.approx(5 / 3)


def test_success_is_reported_for_rewards_of_0_and_1_only() -> None:
    assert "reward/success" not in chain_metrics([chain("0/0", 1.0), chain("0/1", 0.5)])


def test_calls_are_counted_by_tool_and_status_without_metrics_for_unknown_tools() -> None:
    calls = [call(), call(), call("look", CallStatus.ERROR), call("dreamt", CallStatus.UNKNOWN)]
    got = chain_metrics([chain("0/0", calls=calls), chain("0/1")])
    assert (got["calls/chain"], got["calls/error_rate"], got["calls/unknown_rate"]) == (2, 0.25, 0.25)
    assert {name: value for name, value in got.items() if name.startswith("calls/tool/")} == {
        "calls/tool/add": 1,
        "calls/tool/look": 0.5,
    }


def test_repeated_calls_and_distinct_sequences_of_actions() -> None:
    left, right, again = call(action="left"), call(action="right"), call(action="left", repeated=True)
    chains = [chain("0/0", calls=[left]), chain("0/1", calls=[left, again]), chain("0/2", calls=[left, again])]
    got = chain_metrics([*chains, chain("1/0", calls=[left]), chain("1/1", calls=[right]), chain("2/0", calls=[left])])
    assert got["calls/repeated_rate"] == 2 / 8
    assert got["group/distinct_actions"] == pytest.approx((2 / 3 + 1) / 2)
    assert "group/distinct_actions" not in chain_metrics([chain("0/0"), chain("0/1")])


def test_ends_failures_and_treatments_are_counted() -> None:
    failure = Failure(FailureKind.ENVIRONMENT, "it died", 0)
    cut = chain(
        "0/0", stop=StopReason.MAX_TOKENS, treatment=TrainingTreatment.MASK, failures=(failure, failure), attempts=3
    )
    got = chain_metrics([cut, chain("0/1")])
    assert (got["stop/max_tokens"], got["stop/answer"], got["failure/environment"]) == (1, 1, 2)
    assert (got["treatment/mask"], got["treatment/train"]) == (1, 1)
    assert (got["chain/truncated"], got["chain/retries"]) == (0.5, 2)


def test_group_of_equal_rewards_has_no_variance() -> None:
    same = [chain("0/0", 1.0), chain("0/1", 1.0)]
    varied = [chain("1/0", 1.0), chain("1/1", 0.0)]
    masked = [chain("2/0", 1.0), chain("2/1", 0.0, treatment=TrainingTreatment.MASK)]
    zeroed = [chain("3/0", 0.0), chain("3/1", 1.0, treatment=TrainingTreatment.ZERO)]
    alone = [chain("4/0", 1.0)]
    assert chain_metrics([*same, *varied, *masked, *zeroed, *alone])["group/zero_variance"] == pytest.approx(2 / 3)
    assert "group/zero_variance" not in chain_metrics(alone)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ((0.0, 1.0), (0.0, 1.0), True),
        ((0.0, 1.0), (1.0, 0.0), False),
        (None, (0.0, 1.0), True),  # all of it came at the end
        (None, (1.0, 0.0), False),
        ((0.0, 1.0), (0.0, 0.0, 1.0), True),
        ((0.5, 0.5), (0.5, 0.0, 0.5), True),
        ((1.0, 0.0), (1.0,), False),  # the last turn earned nothing in the one, everything in the other
    ],
)
def test_variance_of_turn_rewards_is_per_turn(
    one: tuple[float, ...] | None, other: tuple[float, ...], same: bool
) -> None:
    chains = [
        chain(f"0/{i}", 1.0, turns=2 if value is None else len(value), per_turn=value)
        for i, value in enumerate((one, other))
    ]
    assert is_uniform(chains) is is_uniform(chains[::-1]) is same


def test_staleness_is_how_many_versions_the_sampler_lags_behind() -> None:
    got = chain_metrics([chain("0/0", tokens=3, version=5), chain("0/1", tokens=1, version=1)], version=5)
    assert (got["policy/staleness"], got["policy/staleness_max"]) == (1, 4)
    assert "policy/staleness" not in chain_metrics([chain("0/0", tokens=0)], version=5)


def test_metrics_without_chains() -> None:
    got = chain_metrics([])
    assert got["chains"] == got["chain/turns"] == got["calls/chain"] == 0
    assert "reward/mean" not in got
    assert all(map(math.isfinite, got.values()))


# ── what a reward is made of ──


def test_components_are_metrics_whose_weighted_sum_is_the_reward() -> None:
    figures = [(1, 1, 30), (0, 1, 20), (1, 0, 70), (0, 0, 10), (1, 1, 50), (0, 1, 40)]
    chains = [
        chain(f"0/{i}", right + 0.2 * form, metrics={"right": right, "form": form, "length": length})
        for i, (right, form, length) in enumerate(figures)
    ]
    got = chain_metrics(chains)
    assert (got["score/right"], got["score/length"]) == (0.5, pytest.approx(220 / 6))
    shares = {name: value for name, value in got.items() if name.startswith("reward_share/")}
    assert shares.keys() == {"reward_share/right", "reward_share/form"}
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["reward_share/right"] > 0.9


@pytest.mark.parametrize(
    "metrics",
    [
        lambda i: {"exact": i % 2, "length": i * i},  # the reward is one of its figures
        lambda i: {"a": i, "b": i**3},  # it is no weighted sum of them
        lambda i: {"text": "why", "none": None, "list": [1]},
        lambda i: {"a": math.inf, "b": 1.0},
        lambda i: {"a": 10**400 * i, "b": 1e300 * i, "c": -1e300, "d": True},
        lambda i: {"a": 1.0, "b": 2.0},
        lambda i: {f"m{k}": (i * k) % 7 for k in range(30)},
    ],
)
def test_other_metrics_are_not_components(metrics: object) -> None:
    chains = [chain(f"0/{i}", float(i % 2), metrics=metrics(i)) for i in range(8)]  # type: ignore[operator]
    assert not [name for name in chain_metrics(chains) if name.startswith("reward_share/")]
