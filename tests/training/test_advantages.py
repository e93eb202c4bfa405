"""The advantages of a step: every segment gets its own values and penalties, and KL is counted once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from agentfly.algorithms import GRPO, PPO
from agentfly.algorithms.base import Episode, Group, SegmentArrays
from agentfly.errors import RecordError
from agentfly.segment import Floats
from agentfly.training.advantages import compute_samples, measure_teacher
from agentfly.training.config import TrainConfig
from tests.algorithms.chains import episode

TEMPERATURE = 0.7


class NumberedLearner:
    """Scores the sampled tokens of each segment by numbers that no other segment has."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def _score(self, segments: Sequence[SegmentArrays], first: float) -> list[Floats]:
        return [
            np.where(segment.mask, first - index, 0).astype(np.float32) for index, segment in enumerate(segments, 1)
        ]

    def score(self, segments: Sequence[SegmentArrays], temperature: float) -> list[Floats]:
        assert temperature == TEMPERATURE
        self.calls.append("score")
        return self._score(segments, 0.0)

    def score_reference(self, segments: Sequence[SegmentArrays], temperature: float) -> list[Floats]:
        assert temperature == TEMPERATURE
        self.calls.append("score_reference")
        return [2 * numbers for numbers in self._score(segments, 0.0)]

    def score_teacher(self, segments: Sequence[SegmentArrays], temperature: float) -> list[Floats]:
        assert temperature == TEMPERATURE
        self.calls.append("score_teacher")
        return [3 * numbers for numbers in self._score(segments, 0.0)]

    def values(self, segments: Sequence[SegmentArrays]) -> list[Floats]:
        self.calls.append("values")
        return self._score(segments, 100.0)


@dataclass(frozen=True)
class RecordingPPO(PPO):
    """PPO that keeps the episodes it was given."""

    episodes: list[Episode] = field(default_factory=list)

    def compute_advantages(self, groups: Sequence[Group]) -> list[list[Episode]]:
        self.episodes.extend(episode for group in groups for episode in group.episodes)
        return super().compute_advantages(groups)


def groups_of_several_segments() -> list[Group]:
    """Chains of 3, 1, 2 and 1 segments in two groups."""
    chains = [
        episode([2, 1, 3], 1.0, segments=[0, 1, 2], chain=0),
        episode([2], 0.0, chain=1),
        episode([1, 2, 1], 1.0, segments=[0, 0, 1], group=1, chain=0),
        episode([3], 0.0, group=1, chain=1),
    ]
    return [Group(tuple(chains[:2])), Group(tuple(chains[2:]))]


def compute(
    algorithm: Any, kl: dict[str, Any], learner: Any = None, teacher_model: Any = None, **fields: Any
) -> list[Any]:
    config = TrainConfig(model="tiny", algorithm=algorithm, kl=kl, sampling={"temperature": TEMPERATURE}, **fields)
    groups = groups_of_several_segments()
    return compute_samples(groups, learner or NumberedLearner(), config, config.kl.coef, teacher=teacher_model)


def numbers(arrays: Sequence[Floats] | None) -> list[set[float]]:
    """The distinct numbers at the sampled tokens of each segment."""
    assert arrays is not None
    return [set(np.round(array[array != 0], 4).tolist()) for array in arrays]


def test_every_segment_has_its_own_values_and_penalties() -> None:
    algorithm = RecordingPPO()
    samples = compute(algorithm, {"coef": 0.5, "placement": "reward", "estimator": "k1"})
    # The segment of number n has the value 100 - n; its old log-probability is -n, the reference's -2n.
    segment_numbers = [[1, 2, 3], [4], [5, 6], [7]]
    assert [numbers(chain.values) for chain in algorithm.episodes] == [
        [{100.0 - n} for n in ns] for ns in segment_numbers
    ]
    assert [numbers(chain.penalties) for chain in algorithm.episodes] == [
        [{0.5 * n} for n in ns] for ns in segment_numbers
    ]
    assert [sample.name for sample in samples] == ["0/0#0", "0/0#1", "0/0#2", "0/1#0", "1/0#0", "1/0#1", "1/1#0"]
    assert [numbers([sample.old_logprobs, sample.reference_logprobs]) for sample in samples] == [
        [{-float(n)}, {-2.0 * n}] for n in range(1, 8)
    ]


def test_observations_are_what_tools_answered_in_each_segment() -> None:
    """In the chains of `episode`, the prompt is 1 2 3, the model samples 7, and a tool answers with the turn and 9."""
    for coef in (0.0, 0.1):
        samples = compute("grpo", {}, loss={"observation_coef": coef})
        if not coef:
            assert all(sample.observations is None for sample in samples)
            continue
        answers = [sample.segment.tokens[sample.observations].tolist() for sample in samples]
        assert answers == [[0, 9], [1, 9], [2, 9], [0, 9], [0, 9, 1, 9], [2, 9], [0, 9]]
        assert not any((sample.observations & sample.segment.mask).any() for sample in samples)


def test_groups_without_variance_are_kept_where_observations_are_trained() -> None:
    assert TrainConfig(model="tiny").zero_variance_rule == "skip"
    assert TrainConfig(model="tiny", loss={"observation_coef": 0.1}).zero_variance_rule == "keep"
    assert TrainConfig(model="tiny", loss={"observation_coef": 0.1}, zero_variance="skip").zero_variance_rule == "skip"


@pytest.mark.parametrize("placement", ["loss", "reward"])
def test_kl_is_part_of_the_reward_only_where_it_is_placed_there(placement: str) -> None:
    without_kl = compute(RecordingPPO(), {"coef": 0.0})
    algorithm = RecordingPPO()
    samples = compute(algorithm, {"coef": 0.5, "placement": placement})
    assert all(sample.reference_logprobs is not None for sample in samples)
    assert all((chain.penalties is not None) is (placement == "reward") for chain in algorithm.episodes)
    equal = [
        np.array_equal(sample.advantages, other.advantages) for sample, other in zip(samples, without_kl, strict=True)
    ]
    assert equal == [placement == "loss"] * len(samples)


@pytest.mark.parametrize(
    ("algorithm", "fields", "calls"),
    [
        ("grpo", {}, []),
        ("ppo", {}, ["values"]),
        ("grpo", {"kl": {"coef": 0.1}}, ["score_reference"]),
        ("grpo", {"kl": {"coef": 0.1, "placement": "reward"}}, ["score", "score_reference"]),
        ("grpo", {"teacher": {"model": "tiny", "divergence": "sampled"}}, ["score", "score_teacher"]),
        ("grpo", {"teacher": {"model": "tiny"}}, []),  # the exact divergence is a term of the loss
    ],
)
def test_the_learner_scores_only_what_the_configuration_reads(
    algorithm: str, fields: dict[str, Any], calls: list[str]
) -> None:
    learner = NumberedLearner()
    samples = compute(algorithm, learner=learner, **{"kl": {}, **fields})
    assert learner.calls == calls
    assert all(sample.temperature == TEMPERATURE for sample in samples)
    assert all((sample.returns is not None) is (algorithm == "ppo") for sample in samples)


@pytest.mark.parametrize(("reward_coef", "separate"), [(0.0, False), (2.0, False), (2.0, True)])
def test_sampled_divergence_to_the_teacher_is_added_to_the_advantages(reward_coef: float, separate: bool) -> None:
    """Segment n has the log-probability -n, the teacher's -3n: each token gets coef · (-3n + n)."""
    learner, server = NumberedLearner(), NumberedLearner()
    teacher = {"model": "tiny", "divergence": "sampled", "coef": 0.5, "reward_coef": reward_coef}
    samples = compute("grpo", {}, learner, server if separate else None, teacher=teacher)
    assert ("score_teacher" in server.calls) is separate
    assert ("score_teacher" in learner.calls) is not separate
    without_teacher = compute("grpo", {})
    for number, (sample, other) in enumerate(zip(samples, without_teacher, strict=True), 1):
        divergence = np.where(sample.segment.mask, 0.5 * (-3 * number + number), 0)
        np.testing.assert_allclose(sample.advantages, reward_coef * other.advantages + divergence, rtol=1e-6)
        assert numbers([sample.teacher_logprobs]) == [{-3.0 * number}]
    gaps = [2.0 * number for number, sample in enumerate(samples, 1) for _ in range(sample.segment.num_sampled_tokens)]
    assert measure_teacher(samples) == {"policy/teacher_kl": pytest.approx(np.mean(gaps))}
    assert measure_teacher(without_teacher) == {}


@dataclass(frozen=True)
class ForgetsAnEpisode(GRPO):
    """An algorithm that does not return every episode."""

    def compute_advantages(self, groups: Sequence[Group]) -> list[list[Episode]]:
        return [episodes[:-1] for episodes in super().compute_advantages(groups)]


def test_algorithm_that_loses_an_episode_is_reported() -> None:
    with pytest.raises(RecordError, match=r"compute_advantages of ForgetsAnEpisode must return every episode"):
        compute(ForgetsAnEpisode(), {})
