"""Each alarm is raised once for its condition, names the chains, and is not raised otherwise."""

import math
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentfly.runs import Alarm, AlarmMonitor, AlarmThresholds, EvalFigures, chain_metrics
from agentfly.trajectory import CallStatus, Trajectory
from tests.runs.chains import call, chain

HEALTHY = {
    "reward/mean": 0.5,
    "group/zero_variance": 0.2,
    "policy/entropy": 1.0,
    "policy/kl": 0.02,
    "chain/sampled_tokens": 100.0,
    "chain/turns": 3.0,
    "calls/error_rate": 0.02,
    "calls/invalid_rate": 0.1,
    "calls/repeated_rate": 0.1,
    "update/out_of_memory": 0.0,
}
DRIFTS: dict[str, tuple[dict[str, float], dict[str, float]]] = {
    # what is too much, and what is not quite
    "zero_variance": ({"group/zero_variance": 0.9}, {"group/zero_variance": 0.7}),
    "reward_collapse": ({"reward/mean": 0.05}, {"reward/mean": 0.25}),
    "entropy_collapse": ({"policy/entropy": 0.1}, {"policy/entropy": 0.3}),
    "length_drift": ({"chain/sampled_tokens": 400.0}, {"chain/sampled_tokens": 200.0}),
    "turn_drift": ({"chain/turns": 1.0}, {"chain/turns": 1.5}),
    "tool_errors": ({"calls/error_rate": 0.6}, {"calls/error_rate": 0.2}),
    "repeated_calls": ({"calls/repeated_rate": 0.6}, {"calls/repeated_rate": 0.4}),
    "kl_blow_up": ({"policy/kl": 0.7}, {"policy/kl": 0.3}),
    "not_finite": ({"policy/grad_norm": math.nan}, {"policy/grad_norm": 1e30}),
    "out_of_memory": ({"update/out_of_memory": 1.0}, {"update/micro_batch_tokens": 1.0}),
}


def look(history: Sequence[Mapping[str, float]], chains: Sequence[Trajectory] = ()) -> list[Alarm]:
    watch = AlarmMonitor()
    return [alarm for step, metrics in enumerate(history, 1) for alarm in watch.observe(step, metrics, chains)]


def steps(count: int, **changed: float) -> list[dict[str, float]]:
    return [{**HEALTHY, **changed} for _ in range(count)]


@pytest.mark.parametrize("kind", DRIFTS)
def test_alarm_is_raised_once_above_its_threshold(kind: str) -> None:
    bad, good = DRIFTS[kind]
    rung = look([*steps(6), *steps(12, **bad)])
    assert [alarm.kind for alarm in rung] == [kind]
    assert 7 <= rung[0].step <= 10
    assert look([*steps(6), *steps(12, **good)]) == []


@pytest.mark.parametrize("kind", DRIFTS)
def test_alarm_is_raised_again_only_after_recovery(kind: str) -> None:
    bad, _ = DRIFTS[kind]
    again = look([*steps(6), *steps(5, **bad), *steps(5), *steps(5, **bad)])
    assert [alarm.kind for alarm in again] == [kind, kind]
    between = AlarmThresholds().zero_variance * 0.9
    shaking = [*steps(5, **{"group/zero_variance": 0.9}), *steps(5, **{"group/zero_variance": between})] * 3
    assert [alarm.kind for alarm in look(shaking)] == ["zero_variance"]


@pytest.mark.parametrize("kind", DRIFTS)
def test_single_outlier_is_no_drift_and_missing_metrics_are_ignored(kind: str) -> None:
    bad, _ = DRIFTS[kind]
    if kind not in ("kl_blow_up", "not_finite", "out_of_memory"):  # of these one step is enough
        odd = {name: (HEALTHY[name] * 3 + value) / 4 for name, value in bad.items()}
        assert look([*steps(6), *steps(1, **odd), *steps(6)]) == []
    missing = {name: value for name, value in HEALTHY.items() if name not in bad}
    rung = [alarm.kind for alarm in look([*steps(6), *steps(4, **bad), missing, *steps(4, **bad)])]
    assert rung == [kind] or kind == "not_finite"


def test_surge_of_tool_errors_raises_an_alarm() -> None:
    rung = look([*steps(6), *steps(6, **{"calls/invalid_rate": 0.5})])
    assert [alarm.kind for alarm in rung] == ["tool_errors"]
    assert "of tool calls fail, 12% did at first" in rung[0].message
    assert look(steps(12, **{"calls/invalid_rate": 0.9})) == []  # a model that has yet to learn how to call


def test_jump_of_kl_raises_an_alarm_below_its_limit() -> None:
    assert look([*steps(10, **{"policy/kl": 0.002}), *steps(1, **{"policy/kl": 0.2})])[0].kind == "kl_blow_up"
    assert look([*steps(10, **{"policy/kl": 0.0002}), *steps(1, **{"policy/kl": 0.02})]) == []  # a jump to nothing much


# ── the reward's components ──


def components(right: float, form: float) -> dict[str, float]:
    return {"reward/mean": right + form, "score/right": right, "score/form": form}


def test_falling_component_under_rising_reward_raises_an_alarm() -> None:
    shares = {"reward_share/right": 0.6, "reward_share/form": 0.4}
    gamed = [{**HEALTHY, **components(0.8 - i * 0.05, 0.1 + i * 0.1), **shares} for i in range(12)]
    rung = look(gamed, [chain("0/0", 1.0, metrics={"right": 1.0}), chain("0/1", 1.0, metrics={"right": 0.0})])
    assert [alarm.kind for alarm in rung] == ["reward_dominance"]
    assert "'right' falls" in rung[0].message
    assert rung[0].chains == ("0/1", "0/0")
    both = [{**HEALTHY, **components(0.1 + i * 0.05, 0.1 + i * 0.05), **shares} for i in range(12)]
    assert look(both) == []
    worse = [{**HEALTHY, **components(0.8 - i * 0.05, 0.5), **shares} for i in range(12)]
    assert look(worse) == []  # all of it falls: bad, but nothing is being gamed


def test_dominant_reward_component_raises_an_alarm() -> None:
    rung = look(steps(5, **components(0.5, 0.1), **{"reward_share/right": 0.001, "reward_share/form": 0.999}))
    assert [alarm.kind for alarm in rung] == ["reward_dominance"]
    assert "'form' explains 100%" in rung[0].message
    assert look(steps(5, **components(0.5, 0.1), **{"reward_share/right": 0.05, "reward_share/form": 0.95})) == []


# ── the chains they name ──


def test_alarms_name_the_affected_chains() -> None:
    chains = [
        chain("0/0", 1.0, tokens=50, logprob=-0.1),
        chain("0/1", 1.0, tokens=5, logprob=-2.0, turns=4, calls=[call("add", CallStatus.ERROR)]),
        chain("1/0", 1.0, tokens=20, logprob=-0.5, turns=2),
        chain("1/1", 0.0, tokens=0),
    ]
    named = {kind: look([*steps(6), *steps(5, **bad)], chains)[0].chains for kind, (bad, _) in DRIFTS.items()}
    assert named["zero_variance"] == ("0/0",)  # its whole group earned the same
    assert named["entropy_collapse"] == ("0/0", "1/0", "0/1")  # surest first; one that wrote nothing was not sure
    assert named["length_drift"] == ("0/0", "1/0", "0/1", "1/1")
    assert named["turn_drift"][:2] == ("0/0", "1/1")  # turns became fewer
    assert named["tool_errors"] == ("0/1",)
    assert named["kl_blow_up"][0] == "0/1"


def test_alarms_for_recorded_metrics() -> None:
    same = [chain(f"{group}/{i}", 0.5) for group in range(5) for i in range(2)]
    rung = look([chain_metrics(same)] * 4, same)
    assert [(alarm.kind, alarm.step, len(alarm.chains)) for alarm in rung] == [("zero_variance", 3, 4)]


def test_resumed_run_does_not_repeat_alarms() -> None:
    history = [*steps(6), *steps(5, **{"policy/entropy": 0.1})]
    watch = AlarmMonitor()
    assert [watch.observe(step, metrics) for step, metrics in enumerate(history)][-3:] != []
    assert watch.observe(99, history[-1]) == ()


def test_long_run_is_compared_with_its_first_steps() -> None:
    long = [*steps(6), *steps(1000, **{"policy/entropy": 0.5}), *steps(5, **{"policy/entropy": 0.15})]
    assert [(alarm.kind, alarm.step) for alarm in look(long)] == [("entropy_collapse", 1009)]


# ── any input ──

figure = st.sampled_from([*HEALTHY, "reward_share/a", "reward_share/b", "score/a", "score/b"])
number = st.floats() | st.sampled_from([0.0, -1.0, math.nan, math.inf, 1e-300, 1e300])


@settings(deadline=None)
@given(st.lists(st.dictionaries(figure, number), max_size=14))
def test_any_metrics_are_accepted(history: list[dict[str, float]]) -> None:
    for alarm in look(history, [chain("0/0", 1.0), chain("0/1", None, tokens=0)]):
        assert alarm.message
        assert 1 <= alarm.step <= len(history)


@pytest.mark.parametrize("value", [0.0, 1e-9, 1.0])
def test_constant_history_has_no_drift(value: float) -> None:
    rung = look([dict.fromkeys(HEALTHY, value)] * 30)
    assert not {alarm.kind for alarm in rung} & {"entropy_collapse", "length_drift", "turn_drift"}


def test_failing_calls_are_reported_at_the_first_step_with_the_tools() -> None:
    chains = [
        chain("0/0", 0.0, calls=[call("search", CallStatus.UNKNOWN), call("add", CallStatus.INVALID)]),
        chain("0/1", 0.0, calls=[call("search", CallStatus.UNKNOWN)]),
    ]
    watch = AlarmMonitor()
    (alarm,) = watch.observe(1, chain_metrics(chains), chains, ["add", "lookup"])
    assert alarm.kind == "failing_calls"
    assert alarm.message == (
        "100% of tool calls fail, so nothing can be learned about using the tools; called: 'search' (no such tool, "
        "2 times), 'add' (unreadable, or with wrong arguments, 1 times); the agent's tools: add, lookup"
    )
    assert alarm.chains == ("0/0", "0/1")
    some = [chain("0/0", 1.0, calls=[call("add")]), *chains[1:]]
    assert [alarm.kind for alarm in AlarmMonitor().observe(1, chain_metrics(some), some)] == []


SUCCESS = {"group/zero_variance": 0.9, "policy/entropy": 0.1, "reward/max": 1.0}


def test_solved_tasks_replace_the_alarms_that_success_would_raise() -> None:
    (alarm,) = look([*steps(6), *steps(12, **SUCCESS, **{"reward/mean": 0.97})])
    assert (alarm.kind, alarm.message, alarm.is_warning) == ("solved", "the tasks are solved: use harder ones", False)
    kinds = [alarm.kind for alarm in look([*steps(6), *steps(12, **SUCCESS, **{"reward/mean": 0.6})])]
    assert sorted(kinds) == ["entropy_collapse", "zero_variance"]
    large_scale = {**SUCCESS, "reward/mean": 0.97, "reward/max": 10.0}
    kinds = [alarm.kind for alarm in look([*steps(6), *steps(12, **large_scale)])]
    assert sorted(kinds) == ["entropy_collapse", "zero_variance"]


@pytest.mark.parametrize(("held_out", "kinds"), [(0.95, {"solved"}), (0.8, {"entropy_collapse", "zero_variance"})])
def test_held_out_reward_decides_where_the_training_reward_is_less_clear(held_out: float, kinds: set[str]) -> None:
    monitor = AlarmMonitor()
    history = [*steps(6), *steps(12, **SUCCESS, **{"reward/mean": 0.85})]
    figures = EvalFigures(held_out, held_out, held_out, 8)
    alarms = [a for i, metrics in enumerate(history, 1) for a in monitor.observe(i, metrics, evaluation=figures)]
    assert {alarm.kind for alarm in alarms} == kinds


def test_zero_variance_after_solved_tasks_is_reported_when_the_reward_is_lost() -> None:
    solved = steps(12, **SUCCESS, **{"reward/mean": 0.97})
    kinds = [alarm.kind for alarm in look([*steps(6), *solved, *steps(6, **SUCCESS, **{"reward/mean": 0.4})])]
    assert kinds[0] == "solved"
    assert {"zero_variance", "entropy_collapse"} <= set(kinds[1:])
