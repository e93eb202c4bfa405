"""Products and gates of rewards, through agents."""

from __future__ import annotations

import re

import pytest

from agentfly import Environment, Task, reward, tool
from agentfly.agents import HFAgent
from agentfly.errors import ConfigError
from agentfly.rewards import gate, product, qa_em
from agentfly.scoring import RewardSpec

predictions: list[str] = []


class Lamp(Environment):
    async def reset(self, task: Task) -> None:
        self.shining = False

    @tool
    async def press(self) -> str:
        """Press the switch."""
        self.shining = True
        return "It is shining."


@reward
def shining(env: Lamp) -> float:
    return float(env.shining)


@reward
def half(prediction: str) -> dict[str, object]:
    predictions.append(prediction)
    return {"reward": 0.5, "length": len(prediction)}


@reward
def column(level: float) -> float:
    return level


def agent_of(spec: RewardSpec, script: list[str]) -> HFAgent:
    return HFAgent(tools=[Lamp], reward=spec, template="chatml", backend="scripted", backend_config={"script": script})


PRESS = '<tool_call>{"name": "press", "arguments": {}}</tool_call>'
ROW = {"question": "Light it.", "answer": "done", "level": 0.5}


@pytest.fixture(autouse=True)
def clear_predictions() -> None:
    predictions.clear()


def test_product_multiplies_its_parts() -> None:
    chain = agent_of(product(shining, half, column), [PRESS, "done"]).run_sync(ROW)[0]
    assert chain.reward == 0.25
    assert chain.score.metrics == {"shining": 1.0, "half": 0.5, "half/length": 4, "column": 0.5}


@pytest.mark.parametrize(
    ("level", "problem"), [(1e20, r"'column_square' returned 1e\+40"), (float("nan"), "'column' returned nan")]
)
def test_product_that_is_no_reward_fails_its_own_chain(level: float, problem: str) -> None:
    @reward
    def square(level: float) -> float:
        return level

    rows = [{**ROW, "level": level}, {**ROW, "level": 0.5}]
    bad, good = agent_of(product(half, product(column, square)), ["done"]).run_sync(rows)
    assert (bad.reward, good.reward) == (None, 0.125)
    failure = bad.failures[-1]
    assert re.search(problem, failure.message)
    assert failure.metrics == {"half": 0.5, "half/length": 4}  # of the parts before it


def test_parts_after_a_zero_are_not_evaluated() -> None:
    chain = agent_of(product(shining, half), ["done"]).run_sync(ROW)[0]
    assert chain.reward == 0.0
    assert predictions == []


@pytest.mark.parametrize(("threshold", "earned"), [(1.0, 0.0), (0.5, 1.0), (0.4, 1.0), (0.6, 0.0)])
def test_gate_passes_rewards_from_its_threshold_on(threshold: float, earned: float) -> None:
    chain = agent_of(gate(column, qa_em, threshold=threshold), ["done"]).run_sync(ROW)[0]
    assert chain.reward == earned
    assert ("qa_em" in chain.score.metrics) is bool(earned)


@pytest.mark.parametrize(("threshold", "earned"), [(0.6, 0.0), (0.5, 0.5)])
def test_reward_can_be_its_own_gate(threshold: float, earned: float) -> None:
    chain = agent_of(gate(column, column, threshold=threshold), ["done"]).run_sync(ROW)[0]
    assert chain.reward == earned


def test_products_and_gates_nest_and_are_weighted() -> None:
    both = gate("shining", product("half", qa_em, name="right"), name="gated")
    chain = agent_of({both: 2.0, column: 1.0}, [PRESS, "done"]).run_sync(ROW)[0]
    assert chain.reward == 2 * 0.5 + 0.5
    assert chain.score.metrics["gated"] == 0.5
    assert chain.score.metrics["gated/right/half"] == 0.5


def test_missing_column_of_a_part_is_rejected_before_sampling() -> None:
    with pytest.raises(ConfigError, match="reward 'column' asks for 'level'"):
        agent_of(product(shining, column), ["done"]).run_sync({"question": "Light it."})


def test_invalid_product_is_rejected() -> None:
    with pytest.raises(ConfigError, match="at least two rewards"):
        product(shining)
    with pytest.raises(ConfigError, match="no reward is named 'lti'"):
        product("lti", half)
    with pytest.raises(ConfigError, match="is not a reward"):
        product(shining, 1.0)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="needs a chain"):
        product(shining, half)()
