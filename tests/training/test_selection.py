"""Selection of chains: the failure policy of each, and groups without variance."""

from __future__ import annotations

import pytest

from agentfly.segment import Author, Segment
from agentfly.training.selection import Selection, select_groups
from agentfly.trajectory import Score, StopReason, TrainingTreatment, Trajectory, TurnRecord
from agentfly.types import Completion, FinishReason, Message, Task


def chain(
    group: int,
    number: int,
    reward: float | None,
    treatment: TrainingTreatment = TrainingTreatment.TRAIN,
    per_turn: tuple[float, ...] | None = None,
) -> Trajectory:
    segment = Segment()
    segment.append(Author.TASK, [1, 2], turn=0)
    for turn in range(len(per_turn or (0,))):
        completion = Completion((3, 4), (-0.1, -0.2), (0, 0), FinishReason.STOP)
        segment.append_completion(completion, Message("assistant", "x"), turn=turn)
    turns = (TurnRecord(FinishReason.STOP),) * len(per_turn or (0,))
    score = None if reward is None else Score(reward, per_turn)
    task = Task.of(f"question {group}", str(group))
    return Trajectory(task, (segment.seal(),), turns, StopReason.ANSWER, "x", group, number, score, treatment)


def ids(selection: Selection) -> list[list[str]]:
    return [[episode.trajectory.id for episode in group] for group in selection.groups]


def test_chains_come_back_in_their_groups() -> None:
    selection = select_groups(
        [chain(0, 0, 0.0), chain(0, 1, 1.0), chain(1, 0, 1.0), chain(1, 1, 0.0)], min_chains=2, keep_zero_variance=False
    )
    assert ids(selection) == [["0/0", "0/1"], ["1/0", "1/1"]]
    assert (selection.zero_variance, sum(selection.chains.values())) == (0, 0)


def test_masked_chain_is_excluded_and_zeroed_chain_has_reward_zero() -> None:
    chains = [chain(0, 0, 1.0), chain(0, 1, None, TrainingTreatment.MASK), chain(0, 2, 5.0, TrainingTreatment.ZERO)]
    selection = select_groups(chains, min_chains=2, keep_zero_variance=False)
    assert ids(selection) == [["0/0", "0/2"]]
    assert [episode.total_reward for episode in selection.groups[0]] == [1.0, 0.0]
    assert (selection.chains["masked"], selection.chains["zeroed"]) == (1, 1)


def test_failed_chain_can_drop_its_group() -> None:
    chains = [chain(0, 0, 1.0), chain(0, 1, None, TrainingTreatment.DROP_GROUP), chain(1, 0, 0.0), chain(1, 1, 1.0)]
    selection = select_groups(chains, min_chains=2, keep_zero_variance=False)
    assert ids(selection) == [["1/0", "1/1"]]
    assert selection.chains["dropped"] == 2


def test_group_of_one_remaining_chain_is_dropped() -> None:
    chains = [chain(0, 0, 1.0), chain(0, 1, None, TrainingTreatment.MASK)]
    assert select_groups(chains, min_chains=2, keep_zero_variance=True).chains["alone"] == 1
    assert ids(select_groups(chains, min_chains=1, keep_zero_variance=True)) == [["0/0"]]


@pytest.mark.parametrize("keep", [False, True])
def test_group_without_variance_is_counted_and_treated_as_configured(keep: bool) -> None:
    selection = select_groups([chain(0, 0, 1.0), chain(0, 1, 1.0)], min_chains=2, keep_zero_variance=keep)
    assert (len(selection.groups), selection.zero_variance) == (int(keep), 1)


def test_different_turn_rewards_are_variance() -> None:
    chains = [chain(0, 0, 1.0, per_turn=(1.0, 0.0)), chain(0, 1, 1.0, per_turn=(0.0, 1.0))]
    assert select_groups(chains, min_chains=2, keep_zero_variance=False).zero_variance == 0


def test_selections_of_several_rounds_add_up() -> None:
    one = select_groups([chain(0, 0, 0.0), chain(0, 1, 1.0)], min_chains=2, keep_zero_variance=False)
    two = select_groups(
        [chain(4, 0, 1.0), chain(4, 1, 1.0), chain(4, 2, None, TrainingTreatment.MASK)],
        min_chains=2,
        keep_zero_variance=False,
    )
    assert ids(one + two) == [["0/0", "0/1"]]
    assert ((one + two).zero_variance, (one + two).chains["masked"]) == (1, 1)
