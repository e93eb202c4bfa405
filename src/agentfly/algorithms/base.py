"""The algorithm contract: groups of finished chains in, one advantage per sampled token out.

An algorithm knows no model and no optimizer, and the trainer knows no algorithm: it provides what the algorithm
declares in `needs_values`, `needs_greedy` and `needs_groups`, and receives every episode with its advantages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import numpy.typing as npt

from agentfly.errors import ConfigError, RecordError
from agentfly.segment import Floats, Ids, Mask, Segment
from agentfly.trajectory import StopReason, TrainingTreatment, Trajectory
from agentfly.types import Image, Task

Array = npt.NDArray[np.float64]
SegmentReward = Literal["broadcast", "last", "uniform", "geometric"]
"""How a reward is credited to the segments before the one that earned it, in chains of several segments:

    broadcast   in full, as in the policy gradient
    last        not at all: each segment is credited with its own rewards only
    uniform     each segment up to the earning one receives an equal share
    geometric   `SEGMENT_DECAY` of it per segment of distance
"""
SEGMENT_DECAY = 0.9


def validate_clip(name: str, clip: Sequence[float]) -> None:
    """Raise ConfigError unless a clip of the ratio is (low, high), or (low, high, dual)."""
    low, high, dual = (*clip, math.inf)[:3] if len(clip) in (2, 3) else (math.nan,) * 3
    if not (0 <= low <= 1 and high >= 0 and dual > 1 + high):
        raise ConfigError(
            f"{name} is [low, high] with low from 0 to 1, or [low, high, dual] with dual above 1 + high, such as "
            f"[0.2, 0.28]; not {list(clip)}"
        )


@dataclass(frozen=True, slots=True)
class SegmentArrays:
    """One segment of a chain as arrays, all of shape [tokens].

    With `p` the prompt, `a` sampled tokens and `e` what an environment answered:

        tokens      p0 p1 p2 a0 a1 e0 e1 a2 a3 e2
        input_ids   p0 p1 p2 a0 a1 e0 e1 a2
        positions          ^  ^        ^  ^
        predicts           a0 a1       a2 a3
    """

    tokens: Ids
    mask: Mask
    """True exactly on the tokens the model sampled."""
    logprobs: Floats
    """Log-probability under the distribution sampled from; 0 where not sampled."""
    turns: Ids
    """Index of the chain's turn that each token belongs to."""
    weight_versions: Ids
    """Version of the weights that sampled each token; -1 where not sampled."""
    images: tuple[Image, ...] = ()
    """The images that the model was shown, in order."""
    image_positions: Ids = field(default_factory=lambda: np.empty(0, np.int32))
    """[features] Positions of the tokens of all images, in order."""

    @property
    def positions(self) -> Ids:
        """[sampled] The positions just before the sampled tokens, at which the model's output predicts them."""
        positions = np.flatnonzero(self.mask).astype(np.int32) - 1
        if len(positions) and positions[0] < 0:
            raise RecordError("the first token of a segment has nothing before it: the model cannot have sampled it")
        return positions

    @property
    def input_ids(self) -> Ids:
        """The tokens that the model reads: those from the last sampled token on have no effect on what it predicts."""
        return self.tokens[: self.num_input_tokens]

    @property
    def num_input_tokens(self) -> int:
        """Number of tokens before the last sampled token; 0 if none was sampled."""
        sampled = np.flatnonzero(self.mask)
        return int(sampled[-1]) if len(sampled) else 0

    @property
    def num_sampled_tokens(self) -> int:
        """Number of tokens that the model sampled."""
        return int(self.mask.sum())

    @classmethod
    def from_tokens(cls, tokens: npt.ArrayLike, prompt: int) -> SegmentArrays:
        """Tokens of one turn, of which the first `prompt` are given and the others sampled with log-probability 0."""
        ids = np.asarray(tokens, np.int32)
        zeros = np.zeros_like(ids)
        sampled = np.arange(len(ids)) >= prompt
        return cls(ids, sampled, zeros.astype(np.float32), turns=zeros, weight_versions=zeros)

    @classmethod
    def from_segment(cls, segment: Segment) -> SegmentArrays:
        """The tokens, mask, log-probabilities, turns, weight versions and images of a segment."""
        return cls(
            tokens=segment.tokens,
            mask=segment.mask,
            logprobs=segment.logprobs,
            turns=segment.turns,
            weight_versions=segment.weight_versions,
            images=segment.images if segment.image_token_id is not None else (),
            image_positions=segment.image_positions,
        )


@dataclass(frozen=True)
class Episode:
    """A finished chain as an algorithm sees it: token arrays, turn rewards, the learner's values and penalties.

    Per-token fields have one [tokens] array per segment.
    """

    trajectory: Trajectory
    segments: tuple[SegmentArrays, ...]
    rewards: Floats
    """[turns] Reward of each turn; a reward for the whole chain belongs to the last turn."""
    values: tuple[Floats, ...] | None = None
    """The critic's value of the state before each token; None without a critic."""
    penalties: tuple[Floats, ...] | None = None
    """The KL penalty subtracted from the reward; None where the reward has no KL term."""
    segment_reward: SegmentReward = "broadcast"
    advantages: tuple[Floats, ...] = ()
    """Advantages, 0 where the model did not sample; empty until an algorithm has computed them."""
    returns: tuple[Floats, ...] | None = None
    """The critic's regression targets, 0 where the model did not sample; None without a critic."""

    def __post_init__(self) -> None:
        if self.segment_reward not in (rules := get_args(SegmentReward)):
            raise ConfigError(f"no segment reward is named {self.segment_reward!r}; there are {', '.join(rules)}")
        chain = f"chain {self.trajectory.id}"
        if not np.isfinite(self.rewards).all():
            raise RecordError(f"{chain} has the rewards {self.rewards.tolist()}: a reward must be finite")
        turns = self.turn_index
        if len(turns) and (turns[-1] >= len(self.rewards) or (np.diff(turns) < 0).any()):
            raise RecordError(f"{chain} has tokens of turns out of order, or of turns without a reward")
        for name in ("values", "penalties"):
            arrays = getattr(self, name)
            if arrays is None:
                continue
            if [len(array) for array in arrays] != [len(segment.mask) for segment in self.segments]:
                raise RecordError(f"{chain} must have one of `{name}` for each token of each segment")
            if not np.isfinite(self.gather_sampled_tokens(arrays)).all():
                raise RecordError(f"{chain} has `{name}` that are not finite")

    @classmethod
    def from_trajectory(cls, trajectory: Trajectory, segment_reward: SegmentReward = "broadcast") -> Episode:
        """Convert a chain that is trained. Raises RecordError for a chain that carries no loss."""
        score, treatment = trajectory.score, trajectory.treatment
        if trajectory.untrainable is not None:
            raise RecordError(trajectory.untrainable)
        if treatment in (TrainingTreatment.MASK, TrainingTreatment.DROP_GROUP):
            raise RecordError(f"chain {trajectory.id} carries no loss: its failure policy is {treatment.value!r}")
        if score is None and treatment is not TrainingTreatment.ZERO:
            raise RecordError(f"chain {trajectory.id} has no reward, so nothing can be learned from it")
        rewards = np.zeros(max(len(trajectory.turns), 1), np.float32)
        if score is not None and treatment is not TrainingTreatment.ZERO:
            if score.per_turn is None:
                rewards[-1] = score.total
            else:
                rewards[: len(score.per_turn)] = score.per_turn
        segments = tuple(map(SegmentArrays.from_segment, trajectory.segments))
        return cls(trajectory, segments, rewards, segment_reward=segment_reward)

    @cached_property
    def total_reward(self) -> float:
        """Sum of the turn rewards."""
        return float(self.rewards.sum())

    @cached_property
    def turn_index(self) -> Ids:
        """[sampled] Turn of each sampled token, in sampling order."""
        return self.gather_sampled_tokens([segment.turns for segment in self.segments])

    @cached_property
    def segment_index(self) -> Ids:
        """[sampled] Segment of each sampled token, counting only segments with sampled tokens."""
        indices = self.gather_sampled_tokens(
            [np.full(len(segment.mask), index) for index, segment in enumerate(self.segments)]
        )
        return np.unique(indices, return_inverse=True)[1].astype(np.int32)

    def gather_sampled_tokens(self, arrays: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
        """One [tokens] array per segment → one [sampled] array of the sampled tokens of all segments."""
        rows = [array[segment.mask] for array, segment in zip(arrays, self.segments, strict=True)]
        return np.concatenate(rows) if rows else np.zeros(0, np.int32)

    def with_advantages(self, advantages: Array, returns: Array | None = None) -> Episode:
        """The episode with the advantages of its sampled tokens and, of a critic, their targets; [sampled] each."""
        targets = None if returns is None else self.scatter_sampled_tokens(returns)
        return replace(self, advantages=self.scatter_sampled_tokens(advantages), returns=targets)

    def scatter_sampled_tokens(self, values: npt.NDArray[np.floating]) -> tuple[Floats, ...]:
        """Inverse of `gather_sampled_tokens`: [sampled] → one [tokens] array per segment, 0 where not sampled."""
        out = tuple(np.zeros(len(segment.mask), np.float32) for segment in self.segments)
        end = 0
        for array, segment in zip(out, self.segments, strict=True):
            start, end = end, end + int(segment.mask.sum())
            array[segment.mask] = values[start:end]
        return out


@dataclass(frozen=True, slots=True)
class Group:
    """The trained chains of one task."""

    episodes: tuple[Episode, ...]
    greedy: Episode | None = None
    """A greedy chain of the task, which is not trained; None unless the algorithm needs one."""


@dataclass(frozen=True)
class Algorithm:
    """Turns rewards into advantages. A frozen dataclass, or a `record`, whose fields are its hyperparameters.

    A subclass overrides `turn_advantages` (one advantage per turn, within a group), or `compute_advantages` where
    tokens of a turn differ or the whole batch is normalized.
    """

    needs_values: ClassVar[bool] = False
    """Needs a critic's value of the state before each token."""
    needs_greedy: ClassVar[bool] = False
    """Needs one greedy chain per task."""
    needs_groups: ClassVar[bool] = False
    """Needs at least two chains per task."""
    needs_components: ClassVar[bool] = False
    """Compares the values of an agent's several rewards, not their sum."""
    takes_branches: ClassVar[bool] = False
    """Whether it takes chains that share a prefix (`Trajectory.branch_of`), and weighs them so that it counts once."""

    def __post_init__(self) -> None:
        # A plain dataclass that extends a record, such as PPO, does not validate: the record checks its own fields.
        for cls in type(self).__mro__[1:]:
            if declared := vars(cls).get("__pydantic_fields__"):
                cls(**{name: getattr(self, name) for name in declared})

    def compute_advantages(self, groups: Sequence[Group]) -> list[list[Episode]]:
        """The episodes of each group with their advantages; by default the turn's advantage on each of its tokens."""
        return [
            [
                episode.with_advantages(advantages[episode.turn_index])
                for episode, advantages in zip(group.episodes, self.turn_advantages(group), strict=True)
            ]
            for group in groups
        ]

    def advantages(self, rewards: Sequence[Sequence[float]]) -> list[list[float]]:
        """Advantages of chains of one turn, from bare rewards: one list of numbers per task in, and out.

        Raises ConfigError for an algorithm that needs more than rewards.
        """
        if self.needs_values or self.needs_greedy or self.needs_components:
            more = "the values of several rewards" if self.needs_components else "the reward of a greedy chain"
            more = "a critic's values" if self.needs_values else more
            raise ConfigError(f"{type(self).__name__} needs {more} beside rewards; call compute_advantages with groups")
        token = SegmentArrays.from_tokens([0], prompt=0)
        chain = Trajectory(Task.of("-"), segments=(), turns=(), prediction="", stop=StopReason.ANSWER)
        groups = [
            Group(tuple(Episode(chain, (token,), np.array([reward], np.float32)) for reward in group))
            for group in rewards
        ]
        return [[float(episode.advantages[0][0]) for episode in group] for group in self.compute_advantages(groups)]

    def turn_advantages(self, group: Group) -> list[Array]:
        """One [turns] array per episode of the group."""
        raise NotImplementedError(f"{type(self).__name__} defines neither turn_advantages nor compute_advantages")
