"""Advantages on verl are those of a local run: all algorithms, turn rewards, folded chains, KL in the reward."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from agentfly.algorithms import ALGORITHMS, GRPO
from agentfly.algorithms.base import Episode, Group
from agentfly.algorithms.loss import correction_weights
from agentfly.errors import RecordError
from agentfly.integrations.verl.rows import build_placeholder, build_rows, compute_row_advantages, measure_mismatch
from agentfly.training.advantages import compute_samples
from agentfly.training.config import TrainConfig
from tests.algorithms.chains import trajectory

UIDS = ("a", "b", "c")


def make_groups(*, greedy: bool) -> list[Group]:
    """Two groups of chains of different lengths, folded into several segments, with turn rewards and states."""
    states = {turn: {"room": turn % 2} for turn in range(3)}
    rewards: list[list[Any]] = [[1.0, [0.5, 0.0, 1.0], 0.0], [[0.0, 0.2], 1.0, 0.3]]
    lengths = [[[3, 2], [1, 4, 2], [5]], [[2, 2], [6], [1, 1, 1]]]
    segments = [[[0, 1], [0, 0, 1], [0]], [[0, 1], [0], [0, 1, 2]]]
    groups = []
    for number in range(2):
        episodes = [
            Episode.from_trajectory(
                trajectory(
                    lengths[number][chain],
                    rewards[number][chain],
                    segments=segments[number][chain],
                    states={turn: states[turn] for turn in range(len(lengths[number][chain]))},
                    group=number,
                    chain=chain,
                )
            )
            for chain in range(3)
        ]
        baseline = Episode.from_trajectory(trajectory([2], 0.4, group=number, chain=3)) if greedy else None
        groups.append(Group(tuple(episodes), baseline))
    return groups


@pytest.mark.parametrize(
    ("name", "kl"),
    [
        (name, kl)
        for name in sorted(ALGORITHMS)
        for kl in ({}, {"coef": 0.3, "placement": "reward", "estimator": "k1"})
        if not (kl and name == "gdpo")  # it compares the components of a reward, which KL is none of
    ],
)
@pytest.mark.parametrize("rule", ["broadcast", "geometric"])
def test_rows_have_the_advantages_of_a_local_run(name: str, kl: dict[str, Any], rule: Any) -> None:
    config = TrainConfig(algorithm=name, kl=kl)
    groups = make_groups(greedy=config.algorithm.needs_greedy)
    groups = [
        replace(group, episodes=tuple(replace(episode, segment_reward=rule) for episode in group.episodes))
        for group in groups
    ]
    segments = [segment for group in groups for episode in group.episodes for segment in episode.segments]
    draw = np.random.default_rng(0)
    scores = {
        field: [
            np.where(segment.mask, draw.normal(size=len(segment.mask)), 0).astype(np.float32) for segment in segments
        ]
        for field in ("old_log_probs", "ref_log_prob", "values")
    }
    learner: Any = SimpleNamespace(
        score=lambda *_: scores["old_log_probs"],
        score_reference=lambda *_: scores["ref_log_prob"],
        values=lambda *_: scores["values"],
    )
    expected = compute_samples(groups, learner, config, 0.3)

    # The same scores as verl has them: by row, in another order, with a row of padding.
    keys, fields = ["pad_0_0"], {field: [np.zeros(1, np.float32)] for field in scores}
    fields["response_mask"] = [build_placeholder(0).mask.astype(np.float32)]
    fields["rollout_log_probs"] = [np.zeros(1, np.float32)]
    index = 0
    for group in groups:
        for episode in group.episodes:
            rows = {row.segment: row for row in build_rows(episode.trajectory)}
            for number in range(len(episode.segments)):
                if number in rows:
                    row = rows[number]
                    keys.insert(0, row.key(UIDS[episode.trajectory.group]))
                    fields["response_mask"].insert(0, row.mask.astype(np.float32))
                    fields["rollout_log_probs"].insert(0, row.logprobs)
                    for field, values in scores.items():
                        fields[field].insert(0, values[index][row.response])
                index += 1
    computed = compute_row_advantages(groups, UIDS, keys, fields, config=config, kl_coef=0.3)
    assert [sample.name for sample in computed.samples] == [sample.name for sample in expected]
    by_name = {sample.name: sample for sample in expected}
    checked = 0
    for group in groups:
        for episode in group.episodes:
            for row in build_rows(episode.trajectory):
                index = keys.index(row.key(UIDS[episode.trajectory.group]))
                local = by_name[f"{episode.trajectory.id}#{row.segment}"]
                assert np.abs(computed.advantages[index] - local.advantages[row.response]).max() < 1e-6
                assert not computed.advantages[index][~row.mask].any()
                assert np.array_equal(computed.learner_logprobs[local.name], fields["old_log_probs"][index][row.mask])
                if local.returns is not None:
                    assert np.abs(computed.returns[index] - local.returns[row.response]).max() < 1e-6
                checked += 1
    assert checked == len(expected) == len(keys) - 1
    assert any(advantages.any() for advantages in computed.advantages)
    assert not computed.advantages[keys.index("pad_0_0")].any()


class Reversing(GRPO):
    """Returns the episodes of a group in another order."""

    def compute_advantages(self, groups: Sequence[Group]) -> list[list[Episode]]:
        return [list(reversed(episodes)) for episodes in super().compute_advantages(groups)]


class Forgetful(GRPO):
    """Returns episodes without advantages."""

    def compute_advantages(self, groups: Sequence[Group]) -> list[list[Episode]]:
        return [list(group.episodes) for group in groups]


@pytest.mark.parametrize("algorithm", [Reversing(), Forgetful()])
def test_algorithm_that_returns_other_episodes_is_refused(algorithm: Any) -> None:
    with pytest.raises(
        RecordError, match=f"compute_advantages of {type(algorithm).__name__} must return every episode"
    ):
        compute_samples(make_groups(greedy=False), SimpleNamespace(), TrainConfig(algorithm=algorithm), 0.0)  # type: ignore[arg-type]


def test_correction_is_that_of_a_local_run() -> None:
    import torch

    config = TrainConfig(loss={"correction": "sequence-mask", "correction_cap": 1.5}, epochs=3)
    groups = make_groups(greedy=False)
    rows = [row for group in groups for episode in group.episodes for row in build_rows(episode.trajectory)]
    draw = np.random.default_rng(1)
    old = [np.where(row.mask, row.logprobs + draw.normal(size=len(row.mask)) / 4, 0).astype(np.float32) for row in rows]
    fields = {
        "response_mask": [row.mask.astype(np.float32) for row in rows],
        "rollout_log_probs": [row.logprobs for row in rows],
        "old_log_probs": old,
        "entropy": [np.where(row.mask, 2.0, 9.0).astype(np.float32) for row in rows],
    }
    metrics, correction = measure_mismatch(fields, config)
    assert correction is not None
    for row, learner_logprobs, factors in zip(rows, old, correction, strict=True):
        expected, _ = correction_weights(
            torch.from_numpy(learner_logprobs[row.mask]),
            torch.from_numpy(row.logprobs[row.mask]),
            torch.zeros(int(row.mask.sum()), dtype=torch.int64),
            num_sequences=1,
            correction="sequence-mask",
            cap=1.5,
        )
        assert np.allclose(factors[row.mask], expected.numpy(), atol=1e-6)
    assert 0 < metrics["policy/corrected"] < 1
    assert metrics["policy/entropy"] == 2.0
    assert metrics["policy/tokens"] == 3 * sum(row.mask.sum() for row in rows)
    assert {0.0} < {float(factor) for factors in correction for factor in factors}  # some are masked, some not
