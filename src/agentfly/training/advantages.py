"""Groups of finished chains → training samples with per-token advantages.

One batched pass of the learner each computes what the configuration needs (old, reference and teacher
log-probabilities, values). Where KL is part of the reward, its penalty is subtracted there. The algorithm does the
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
    kl_in_reward = config.kl.coef > 0 and config.kl.placement == "reward"
    distill = config.teacher.model is not None
    score_sampled_tokens = distill and not config.teacher.is_exact

    # Each list is aligned with `segments`; None where this configuration does not read it, which saves a pass.
    missing: list[Floats | None] = [None] * len(segments)
    old = learner.score(segments, temperature) if kl_in_reward or score_sampled_tokens else missing
    reference = learner.score_reference(segments, temperature) if config.kl.coef else missing
    teacher_scores = (teacher or learner).score_teacher(segments, temperature) if score_sampled_tokens else missing
    values = learner.values(segments) if config.algorithm.needs_values else missing
    penalties = [
        kl_penalty(student_logprobs, reference_logprobs, config.kl.estimator, kl_coef)
        for student_logprobs, reference_logprobs in zip(old, reference, strict=True)
        if kl_in_reward and student_logprobs is not None and reference_logprobs is not None
    ]

    scored_groups = []
    start = 0
    for group in groups:
        episodes = []
        for episode in group.episodes:
            # Segments of all episodes lie in one list: an offset that is one too small gives an episode its neighbor's
            # values.
            end = start + len(episode.segments)
            episode_values = tuple(value for value in values[start:end] if value is not None) or None
            episode_penalties = tuple(penalties[start:end]) if kl_in_reward and kl_coef else None
            episodes.append(replace(episode, values=episode_values, penalties=episode_penalties))
            start = end
        scored_groups.append(replace(group, episodes=tuple(episodes)))

    if config.learns_from_rewards:
        computed = config.algorithm.compute_advantages(scored_groups)
    else:
        computed = [
            [episode.with_advantages(np.zeros(len(episode.turn_index))) for episode in group.episodes]
            for group in groups
        ]
    # An algorithm of a user that reorders or drops episodes would train tokens with the advantages of others.
    expected = [[(episode.trajectory.id, len(episode.segments)) for episode in group.episodes] for group in groups]
    if [[(episode.trajectory.id, len(episode.advantages)) for episode in group] for group in computed] != expected:
        raise RecordError(
            f"compute_advantages of {type(config.algorithm).__name__} must return every episode of every group, in "
            "order, each with an array of advantages per segment: Episode.with_advantages"
        )
    samples = []
    index = 0  # of the segment among `segments`, those without sampled tokens included
    for episode in (episode for group in computed for episode in group):
        returns = episode.returns or (None,) * len(episode.segments)
        for number, segment in enumerate(episode.segments):
            advantages = episode.advantages[number]
            student_logprobs, teacher_logprobs = old[index], teacher_scores[index]
            if distill:
                advantages = config.teacher.reward_coef * advantages
            if student_logprobs is not None and teacher_logprobs is not None:
                advantages = advantages + teacher_advantages(student_logprobs, teacher_logprobs, config.teacher.coef)
            observations = None
            if config.loss.observation_coef:
                observations = episode.trajectory.segments[number].observation_mask
            if segment.mask.any():  # a segment without sampled tokens has nothing to train
                samples.append(
                    Sample(
                        segment,
                        advantages,
                        temperature,
                        returns=returns[number],
                        reference_logprobs=reference[index],
                        teacher_logprobs=teacher_logprobs,
                        old_logprobs=student_logprobs,
                        observations=observations,
                        name=f"{episode.trajectory.id}#{number}",
                    )
                )
            index += 1
    return samples


def measure_teacher(samples: Sequence[Sample]) -> dict[str, float]:
    """The sampled reverse KL divergence to the teacher before the update, in nats per token; empty without one."""
    gaps = [
        (sample.old_logprobs - sample.teacher_logprobs)[sample.segment.mask]
        for sample in samples
        if sample.old_logprobs is not None and sample.teacher_logprobs is not None
    ]
    return {"policy/teacher_kl": float(np.concatenate(gaps).mean())} if gaps else {}
