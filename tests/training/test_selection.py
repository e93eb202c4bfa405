"""Which chains are trained: the failure policy says so of each, and groups without variance are counted."""

from __future__ import annotations

import pytest

from agentfly.outcome import Score, StopReason, Treatment, Turn
from agentfly.segment import Author, Segment
from agentfly.training.selection import Selection, select
from agentfly.trajectory import Trajectory
from agentfly.types import Completion, Finish, Message, Task


def chain(
    group: int,
    number: int,
    reward: float | None,
    treatment: Treatment = Treatment.TRAIN,
    per_turn: tuple[float, ...] | None = None,
) -> Trajectory:
    segment = Segment()
    segment.show(Author.TASK, [1, 2], turn=0)
    for turn in range(len(per_turn or (0,))):
        said = Completion((3, 4), (-0.1, -0.2), (0, 0), Finish.STOP)
        segment.sample(said, Message("assistant", "x"), turn=turn)
    turns = (Turn(Finish.STOP),) * len(per_turn or (0,))
    score = None if reward is None else Score(reward, per_turn)
    task = Task.of(f"question {group}", str(group))
    return Trajectory(task, (segment.seal(),), turns, StopReason.ANSWER, "x", group, number, score, treatment)


def ids(selection: Selection) -> list[list[str]]:
    return [[episode.trajectory.id for episode in group] for group in selection.groups]


def test_chains_come_back_in_their_groups() -> None:
    selection = select(
        [chain(0, 0, 0.0), chain(0, 1, 1.0), chain(1, 0, 1.0), chain(1, 1, 0.0)], least=2, keep_flat=False
    )
    assert ids(selection) == [["0/0", "0/1"], ["1/0", "1/1"]]
    assert (selection.flat, sum(selection.chains.values())) == (0, 0)


def test_a_masked_chain_counts_in_nothing_and_a_zeroed_one_earns_nothing() -> None:
    chains = [chain(0, 0, 1.0), chain(0, 1, None, Treatment.MASK), chain(0, 2, 5.0, Treatment.ZERO)]
    selection = select(chains, least=2, keep_flat=False)
    assert ids(selection) == [["0/0", "0/2"]]
    assert [episode.total for episode in selection.groups[0]] == [1.0, 0.0]
    assert (selection.chains["masked"], selection.chains["zeroed"]) == (1, 1)


def test_a_chain_can_take_its_group_with_it() -> None:
    chains = [chain(0, 0, 1.0), chain(0, 1, None, Treatment.DROP_GROUP), chain(1, 0, 0.0), chain(1, 1, 1.0)]
    selection = select(chains, least=2, keep_flat=False)
    assert ids(selection) == [["1/0", "1/1"]]
    assert selection.chains["dropped"] == 2


def test_a_chain_that_is_left_alone_has_nobody_to_be_compared_with() -> None:
    chains = [chain(0, 0, 1.0), chain(0, 1, None, Treatment.MASK)]
    assert select(chains, least=2, keep_flat=True).chains["alone"] == 1
    assert ids(select(chains, least=1, keep_flat=True)) == [["0/0"]]


@pytest.mark.parametrize("keep", [False, True])
def test_a_group_that_earned_the_same_is_counted_and_kept_as_declared(keep: bool) -> None:
    selection = select([chain(0, 0, 1.0), chain(0, 1, 1.0)], least=2, keep_flat=keep)
    assert (len(selection.groups), selection.flat) == (int(keep), 1)


def test_turns_that_were_rewarded_differently_are_no_flat_group() -> None:
    chains = [chain(0, 0, 1.0, per_turn=(1.0, 0.0)), chain(0, 1, 1.0, per_turn=(0.0, 1.0))]
    assert select(chains, least=2, keep_flat=False).flat == 0


def test_selections_of_several_rounds_add_up() -> None:
    one = select([chain(0, 0, 0.0), chain(0, 1, 1.0)], least=2, keep_flat=False)
    two = select([chain(4, 0, 1.0), chain(4, 1, 1.0), chain(4, 2, None, Treatment.MASK)], least=2, keep_flat=False)
    assert ids(one + two) == [["0/0", "0/1"]]
    assert ((one + two).flat, (one + two).chains["masked"]) == (1, 1)
