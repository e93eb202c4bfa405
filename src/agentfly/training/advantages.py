"""Groups of finished chains → training samples with per-token advantages.

The learner is asked in one batched pass each for what the configuration needs (old, reference and teacher
log-probabilities, values). Where KL is part of the reward, its penalty is subtracted there; the algorithm does the
rest. With a teacher, A = teacher.coef · (log π_teacher − log π) + teacher.reward_coef · A_algorithm, token by token;
where the divergence to the teacher is exact, it is a term of the loss, and only the second summand is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from agentfly.algorithms.base import Group
from agentfly.algorithms.kl import kl_penalty, teacher_advantages
from agentfly.errors import RecordError
from agentfly.segment import Floats
from agentfly.training.batch import Sample
from agentfly.training.config import TrainConfig
from agentfly.training.learner import Learner, Teacher


def compute_samples(
    groups: Sequence[Group], learner: Learner, config: TrainConfig, kl_coef: float, *, teacher: Teacher | None = None
) -> list[Sample]:
    """One sample per segment that contains sampled tokens.

    kl_coef: the current KL coefficient, which changes during a run when `kl.target` is set. teacher: scores the tokens
    where the configuration has a teacher; None is the learner.
    """
    segments = [segment for group in groups for episode in group.episodes for segment in episode.segments]
    temperature = config.sampling.temperature
    in_reward = config.kl.coef > 0 and config.kl.placement == "reward"

    # Each list is aligned with `segments`; None where this configuration does not read it.
    missing: list[Floats | None] = [None] * len(segments)
    distill = config.teacher.model is not None
    sampled = distill and not config.teacher.is_exact
    old = learner.score(segments, temperature) if in_reward or sampled else missing
    reference = learner.score_reference(segments, temperature) if config.kl.coef else missing
    taught = (teacher or learner).score_teacher(segments, temperature) if sampled else missing
    values = learner.values(segments) if config.algorithm.needs_values else missing
    penalties = [
        kl_penalty(mine, theirs, config.kl.estimator, kl_coef)
        for mine, theirs in zip(old, reference, strict=True)
        if in_reward and mine is not None and theirs is not None
    ]

    # Give each episode the values and penalties of its own segments.
    scored_groups = []
    start = 0
    for group in groups:
        episodes = []
        for episode in group.episodes:
            own = slice(start, start + len(episode.segments))
            start = own.stop
            own_values = tuple(each for each in values[own] if each is not None) or None
            own_penalties = tuple(penalties[own]) if in_reward and kl_coef else None
            episodes.append(replace(episode, values=own_values, penalties=own_penalties))
        scored_groups.append(replace(group, episodes=tuple(episodes)))

    if config.learns_from_rewards:
        computed = config.algorithm.compute_advantages(scored_groups)
    else:
        computed = [[each.with_advantages(np.zeros(len(each.turn_index))) for each in g.episodes] for g in groups]
    samples = []
    index = 0
    expected = [[(each.trajectory.id, len(each.segments)) for each in group.episodes] for group in groups]
    if [[(each.trajectory.id, len(each.advantages)) for each in episodes] for episodes in computed] != expected:
        raise RecordError(
            f"compute_advantages of {type(config.algorithm).__name__} must return every episode of every group, in "
            "order, each with an array of advantages per segment: Episode.with_advantages"
        )
    for episode in (episode for episodes in computed for episode in episodes):
        returns = episode.returns or (None,) * len(episode.segments)
        for number, segment in enumerate(episode.segments):
            advantages = episode.advantages[number]
            mine, theirs = old[index], taught[index]
            if distill:
                advantages = config.teacher.reward_coef * advantages
            if mine is not None and theirs is not None:
                advantages = advantages + teacher_advantages(mine, theirs, config.teacher.coef)
            if segment.mask.any():  # a segment without sampled tokens has nothing to train
                samples.append(
                    Sample(
                        segment,
                        advantages,
                        temperature,
                        returns=returns[number],
                        reference_logprobs=reference[index],
                        teacher_logprobs=theirs,
                        old_logprobs=mine,
                        name=f"{episode.trajectory.id}#{number}",
                    )
                )
            index += 1
    return samples


def measure_teacher(samples: Sequence[Sample]) -> dict[str, float]:
    """The sampled reverse KL divergence to the teacher before the update, in nats per token; empty without one."""
    gaps = [
        (each.old_logprobs - each.teacher_logprobs)[each.segment.mask]
        for each in samples
        if each.old_logprobs is not None and each.teacher_logprobs is not None
    ]
    return {"policy/teacher_kl": float(np.concatenate(gaps).mean())} if gaps else {}
