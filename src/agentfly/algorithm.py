"""The algorithm contract: what each sampled token was worth.

An algorithm sees groups of finished chains and says, for every token that the model sampled, how much better it was
than expected. It knows no model and no optimizer, and the trainer knows no algorithm: it asks for what an algorithm
`needs`, hands over the groups, and gets a `Credit` for each chain back.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import numpy.typing as npt

from agentfly.errors import ConfigError, RecordError
from agentfly.outcome import Treatment
from agentfly.segment import Floats, Ids, Mask, Segment
from agentfly.trajectory import Trajectory

SegmentReward = Literal["broadcast", "last", "uniform", "geometric"]
"""How much of a reward the segments before the one that earned it are credited with, where a chain has several:

    broadcast   all of it, as the policy gradient has it
    last        nothing: each segment is credited with what it earned itself
    uniform     each segment up to the earning one gets an equal share
    geometric   `SEGMENT_DECAY` of it for the segment before, of that for the one before that, and so on
"""
SEGMENT_DECAY = 0.9


class Needs(enum.Flag):
    """What an algorithm wants to know beside the rewards."""

    NOTHING = 0
    VALUES = enum.auto()
    """A learned critic's value of the state before each token."""
    GREEDY = enum.auto()
    """One greedy chain of each task."""
    GROUPS = enum.auto()
    """At least two chains of each task."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One segment of a chain as arrays, one number a token."""

    tokens: Ids
    mask: Mask
    """True exactly where the model sampled."""
    logprobs: Floats
    """Under the distribution that was sampled from; 0 where nothing was."""
    turns: Ids
    """Which turn of the chain each token belongs to."""
    versions: Ids
    """The weights each token was sampled with; -1 where nothing was."""

    @classmethod
    def of(cls, segment: Segment) -> Piece:
        spans = segment.spans
        turns = np.repeat([span.turn for span in spans], [len(span) for span in spans])
        return cls(segment.tokens, segment.mask, segment.logprobs, turns.astype(np.int32), segment.weight_versions)


@dataclass(frozen=True)
class Episode:
    """A finished chain as an algorithm sees it: its pieces, what its turns earned, and what the learner says of it."""

    trajectory: Trajectory
    pieces: tuple[Piece, ...]
    rewards: Floats
    """What each turn earned; a reward without turns is earned by the last."""
    values: tuple[Floats, ...] | None = None
    """For each piece, the value of the state before each token; None without a critic."""
    penalties: tuple[Floats, ...] | None = None
    """For each piece, what each token pays for straying from the reference model; None where nothing is charged."""
    segment_reward: SegmentReward = "broadcast"

    def __post_init__(self) -> None:
        if self.segment_reward not in (rules := get_args(SegmentReward)):
            raise ConfigError(f"no segment reward is named {self.segment_reward!r}; there are {', '.join(rules)}")
        if not np.isfinite(self.rewards).all():
            raise RecordError(f"chain {self.trajectory.id} earned {self.rewards.tolist()}: a reward must be finite")
        turns = self.turns
        if len(turns) and (turns[-1] >= len(self.rewards) or (np.diff(turns) < 0).any()):
            raise RecordError(
                f"chain {self.trajectory.id} has tokens of turns out of order, or of turns without a reward"
            )
        for name in ("values", "penalties"):
            self._check_numbers(name, getattr(self, name))

    def _check_numbers(self, name: str, numbers: tuple[Floats, ...] | None) -> None:
        if numbers is None:
            return
        if [len(each) for each in numbers] != [len(piece.mask) for piece in self.pieces]:
            raise RecordError(f"chain {self.trajectory.id} must have one of `{name}` for each token of each piece")
        if not all(np.isfinite(each[piece.mask]).all() for each, piece in zip(numbers, self.pieces, strict=True)):
            raise RecordError(f"chain {self.trajectory.id} has `{name}` that are no finite numbers")

    @classmethod
    def of(cls, trajectory: Trajectory, segment_reward: SegmentReward = "broadcast") -> Episode:
        """Of a chain that is to be trained; one that is not is an error."""
        if trajectory.untrainable is not None:
            raise RecordError(trajectory.untrainable)
        if trajectory.treatment in (Treatment.MASK, Treatment.DROP_GROUP):
            raise RecordError(f"chain {trajectory.id} carries no loss: its failure says {trajectory.treatment.value!r}")
        if trajectory.score is None and trajectory.treatment is not Treatment.ZERO:
            raise RecordError(f"chain {trajectory.id} has no reward, so nothing can be learned from it")
        pieces = tuple(map(Piece.of, trajectory.segments))
        return cls(trajectory, pieces, _turn_rewards(trajectory), segment_reward=segment_reward)

    @cached_property
    def total(self) -> float:
        """What the whole chain earned."""
        return float(self.rewards.sum())

    @cached_property
    def turns(self) -> Ids:
        """The turn of each sampled token, in the order they were sampled."""
        return self.sampled([piece.turns for piece in self.pieces])

    @cached_property
    def segments(self) -> Ids:
        """The segment of each sampled token, counting those that have any."""
        indices = self.sampled([np.full(len(piece.mask), index) for index, piece in enumerate(self.pieces)])
        return np.unique(indices, return_inverse=True)[1].astype(np.int32)

    def sampled(self, numbers: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
        """Of one number a token in each piece, those of the sampled tokens in a row."""
        rows = [each[piece.mask] for each, piece in zip(numbers, self.pieces, strict=True)]
        return np.concatenate(rows) if rows else np.zeros(0, np.int32)

    def spread(self, numbers: npt.NDArray[np.floating]) -> tuple[Floats, ...]:
        """The opposite: numbers of the sampled tokens in a row at their places in each piece, and 0 everywhere else."""
        out, end = tuple(np.zeros(len(piece.mask), np.float32) for piece in self.pieces), 0
        for each, piece in zip(out, self.pieces, strict=True):
            start, end = end, end + int(piece.mask.sum())
            each[piece.mask] = numbers[start:end]
        return out


def _turn_rewards(trajectory: Trajectory) -> Floats:
    out = np.zeros(max(len(trajectory.turns), 1), np.float32)
    score = trajectory.score
    if score is None or trajectory.treatment is Treatment.ZERO:
        return out
    if score.per_turn is None:
        out[-1] = score.total
    else:
        out[: len(score.per_turn)] = score.per_turn
    return out


@dataclass(frozen=True, slots=True)
class Group:
    """The chains of one task that count."""

    episodes: tuple[Episode, ...]
    greedy: Episode | None = None
    """A greedy chain of the task, which is not trained; None where the algorithm needs none."""


@dataclass(frozen=True, slots=True)
class Credit:
    """What each token of a chain was worth: an array a piece, one number a token, 0 where the model did not sample."""

    advantages: tuple[Floats, ...]
    returns: tuple[Floats, ...] | None = None
    """What the critic should have said before each token; None without a critic."""


@dataclass(frozen=True)
class Algorithm(ABC):
    """Turns rewards into advantages. A frozen dataclass whose fields are its settings."""

    needs: ClassVar[Needs] = Needs.NOTHING

    def __post_init__(self) -> None:
        for name in ("gamma", "lam"):
            value = getattr(self, name, 1.0)
            if not isinstance(value, int | float) or not 0 <= value <= 1:
                raise ConfigError(f"{type(self).__name__}: {name} is a number from 0 to 1, not {getattr(self, name)}")

    @abstractmethod
    def credit(self, groups: Sequence[Group]) -> list[list[Credit]]:
        """A credit for each episode of each group, in their order."""
