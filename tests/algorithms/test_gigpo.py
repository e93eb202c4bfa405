"""GiGPO: which turns share an anchor state, and the advantage that comparing them adds."""

from statistics import mean, stdev
from typing import Any

import numpy as np
import pytest

from agentfly import reward, tool
from agentfly.algorithms import GRPO, DrGRPO, GiGPO
from agentfly.algorithms.base import Episode
from agentfly.algorithms.gigpo import anchor_states
from agentfly.errors import RecordError
from tests.algorithms.chains import advantages, episode
from tests.fakes import byte_agent, call

CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def test_turns_from_the_same_state_are_compared() -> None:
    """Chains a and b saw the same after their first turn, c another thing: its second turn is compared with none."""
    a = episode([1, 2], 1.0, observations={0: [4, 5]})
    b = episode([2, 1], 0.0, observations={0: [4, 5]})
    c = episode([1, 1], 1.0, observations={0: [4, 6]})
    (chains,) = advantages(GRPO(), [a, b, c])
    (credits,) = advantages(GiGPO(weight=0.5, gamma=0.5), [a, b, c])
    first, second = [0.5, 0.0, 0.5], [1.0, 0.0]
    steps = [
        [z_score(first, 0), z_score(second, 0), z_score(second, 0)],
        [z_score(first, 1), z_score(first, 1), z_score(second, 1)],
        [z_score(first, 2), 0.0],
    ]
    for got, whole, step in zip(credits, chains, steps, strict=True):
        np.testing.assert_allclose(got, whole + 0.5 * np.array(step), **CLOSE)


def test_state_is_compared_at_whatever_turn_it_is_reached() -> None:
    """Chain a is at the lake in its second turn, chain b in its third."""
    a = episode([1, 1, 1], 1.0, states={0: "lake", 1: "hill"})
    b = episode([1, 1, 1], 0.0, states={0: "wood", 1: "lake"})
    (chains,) = advantages(DrGRPO(), [a, b])
    (credits,) = advantages(GiGPO(std=False, gamma=0.5), [a, b])
    # Returns of a: 0.25, 0.5, 1; of b: 0. The task and the lake are shared, the hill and the wood are not.
    np.testing.assert_allclose(credits[0], chains[0] + [0.125, 0.25, 0.0], **CLOSE)
    np.testing.assert_allclose(credits[1], chains[1] + [-0.125, 0.0, -0.25], **CLOSE)


def z_score(numbers: list[float], at: int) -> float:
    return (numbers[at] - mean(numbers)) / (stdev(numbers) + 1e-6)


def test_without_the_standard_deviation() -> None:
    a, b = (episode([1, 1], r, observations={0: [4]}) for r in (1.0, 0.0))
    (chains,), (credits,) = advantages(DrGRPO(), [a, b]), advantages(GiGPO(std=False, gamma=0.5), [a, b])
    np.testing.assert_allclose(credits[0], chains[0] + [0.25, 0.5], **CLOSE)


def test_state_returned_by_a_tool_replaces_the_observation() -> None:
    same = [episode([1, 1], 0.0, observations={0: [n]}, states={0: {"x": 1, "y": 2}}) for n in (4, 5)]
    turned = episode([1, 1], 0.0, states={0: {"y": 2, "x": 1}})
    other = episode([1, 1], 0.0, observations={0: [4]}, states={0: {"x": 2, "y": 2}})
    assert anchor_states(same[0]) == anchor_states(same[1]) == anchor_states(turned)
    assert anchor_states(other)[1] != anchor_states(same[0])[1]


@pytest.mark.parametrize("state", [None, 0, "", [], False])
def test_a_state_may_be_empty(state: Any) -> None:
    here, second = (episode([1, 1], 0.0, observations={0: [n]}, states={0: state}) for n in (4, 5))
    assert anchor_states(here) == anchor_states(second)


def test_first_turns_share_the_task_state_and_empty_turns_match_nothing() -> None:
    a, b = (episode([1, 0, 1], 0.0, observations={1: [4]}) for _ in range(2))
    assert anchor_states(a)[0] == anchor_states(b)[0]
    assert anchor_states(a)[1] != anchor_states(b)[1]
    assert anchor_states(a)[2] == anchor_states(b)[2]


def test_separate_segment_shows_its_whole_history() -> None:
    """The turn that opens a rewritten segment is told apart by all it was shown."""
    one = episode([1, 1], 0.0, segments=[0, 1])
    assert anchor_states(one) == ["task", np.array([1, 2, 3], np.int32).tobytes()]


def test_state_must_be_json() -> None:
    with pytest.raises(RecordError, match="info of tool 'look': 'state' holds a dict that JSON cannot keep"):
        anchor_states(episode([1, 1], 0.0, states={0: {(0, 1): "wall"}}))


@tool
def walk(to: str) -> dict[str, Any]:
    """Go somewhere."""
    return {"observation": f"You see {to.upper()}.", "state": {"at": to}}


@tool
def look(at: str) -> str:
    """Look at something."""
    return f"A {at}."


@reward
def says_done(prediction: str) -> float:
    return float(prediction == "Done.")


@pytest.mark.parametrize("strategy", ["chain", "step"])
async def test_anchor_states_of_real_chains(strategy: Any) -> None:
    """Turns after a walk are told apart by the state it returned, others by what was shown."""
    agent = byte_agent(
        [call("walk", to="lake"), call("look", at="fish"), call("look", at="fish"), "Done."],
        tools=[walk, look],
        reward=says_done,
    )
    chain, twin = map(Episode.from_trajectory, await agent.run("Go.", 5, 2, strategy=strategy))
    assert len(chain.segments) == (4 if strategy == "step" else 1)
    assert chain.rewards.tolist() == [0, 0, 0, 1]
    assert anchor_states(chain) == anchor_states(twin)
    task, lake, fish, again = anchor_states(chain)
    assert (task, lake) == ("task", '{"at": "lake"}')
    assert isinstance(fish, bytes)
    assert (fish == again) is (strategy == "chain")  # a step shows the history too, which is another by then
    (chain_credit, same) = advantages(GiGPO(), [chain, twin])[0]
    assert len(chain_credit) == chain.turn_index.size == same.size
