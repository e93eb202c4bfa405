"""Small chains for the algorithms, and as padded arrays for other frameworks."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from agentfly.algorithms.base import Algorithm, Episode, Group, SegmentReward
from agentfly.segment import Author, Segment
from agentfly.trajectory import CallRecord, CallStatus, Score, ScoreComponent, StopReason, Trajectory, TurnRecord
from agentfly.types import Completion, FinishReason, Message, Task

Array = npt.NDArray[Any]


def trajectory(
    lengths: Sequence[int],
    reward: float | Sequence[float] = 0.0,
    *,
    segments: Sequence[int] | None = None,
    observations: Mapping[int, Sequence[int]] | None = None,
    states: Mapping[int, Any] | None = None,
    components: Mapping[str, float] | None = None,
    weights: Mapping[str, float] | None = None,
    **fields: Any,
) -> Trajectory:
    """A chain that sampled these numbers of tokens in its turns, with two tokens of a tool's between turns.

    `segments` says in which segment each turn is; `observations` and `states` what a turn's tool answered;
    `components` and `weights` the values and weights of several rewards.
    """
    where = list(segments or [0] * len(lengths))
    built = [Segment() for _ in range(max(where, default=0) + 1)]
    for number, segment in enumerate(built):
        segment.append(Author.HISTORY if number else Author.TASK, [1, 2, 3], turn=where.index(number) if where else 0)
    for turn, (length, at) in enumerate(zip(lengths, where, strict=True)):
        finish = FinishReason.STOP if length else FinishReason.ABORTED
        built[at].append_completion(Completion([7] * length, [-0.5] * length, [0] * length, finish), _REPLY, turn=turn)
        built[at].append(Author.TOOL, (observations or {}).get(turn, [turn, 9]), turn=turn + 1)
    info = {turn: {"state": state} for turn, state in (states or {}).items()}
    turns = tuple(
        TurnRecord(FinishReason.STOP, (CallRecord("look", CallStatus.OK, info=info.get(t, {})),))
        for t in range(len(lengths))
    )
    total = float(np.sum(reward))
    values = {"whole": total} if components is None else components
    score = Score(
        total,
        None if isinstance(reward, float | int) else tuple(reward),
        components={name: ScoreComponent((weights or {}).get(name, 1.0), value) for name, value in values.items()},
    )
    kept = {"score": score, **fields}
    return Trajectory(Task(()), tuple(s.seal() for s in built), turns, StopReason.ANSWER, "", **kept)


_REPLY = Message("assistant", "…")


def episode(
    lengths: Sequence[int],
    reward: float | Sequence[float] = 0.0,
    *,
    rule: SegmentReward = "broadcast",
    values: Sequence[float] | None = None,
    penalties: Sequence[float] | None = None,
    **more: Any,
) -> Episode:
    """The same as an episode; values and penalties are given for the sampled tokens in a row."""
    plain = Episode.from_trajectory(trajectory(lengths, reward, **more), rule)
    numbers = {"values": values, "penalties": penalties}
    return replace(
        plain, **{k: plain.scatter_sampled_tokens(np.array(v, float)) for k, v in numbers.items() if v is not None}
    )


def advantages(algorithm: Algorithm, *groups: Sequence[Episode], greedy: Episode | None = None) -> list[list[Array]]:
    """The advantages of the sampled tokens of each episode, in a row; those of all others are 0, or it is an error."""
    built_groups = [Group(tuple(group), greedy) for group in groups]
    credits = algorithm.compute_advantages(built_groups)
    return [
        [_check_credit(episode, credit) for episode, credit in zip(group.episodes, of_group, strict=True)]
        for group, of_group in zip(built_groups, credits, strict=True)
    ]


def _check_credit(original: Episode, credit: Episode) -> Array:
    for numbers in (credit.advantages, credit.returns or ()):
        for number, piece in zip(numbers, original.segments, strict=False):
            assert number.dtype == np.float32
            assert not number[~piece.mask].any()
    assert len(credit.advantages) == len(original.segments)
    return original.gather_sampled_tokens(credit.advantages)
