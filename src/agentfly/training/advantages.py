"""Groups of finished chains → training samples with per-token advantages.

The learner is asked in one batched pass each for what the configuration needs (old and reference log-probabilities,
values). Where KL is part of the reward, its penalty is subtracted there; the algorithm does the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from agentfly.algorithms.base import Group
from agentfly.algorithms.kl import kl_penalty
from agentfly.segment import Floats
from agentfly.training.batch import Sample
from agentfly.training.config import TrainConfig
from agentfly.training.learner import Learner


def compute_samples(groups: Sequence[Group], learner: Learner, config: TrainConfig, kl_coef: float) -> list[Sample]:
    """One sample per segment that contains sampled tokens.

    kl_coef: the current KL coefficient, which changes during a run when `kl.target` is set.
    """
    segments = [segment for group in groups for episode in group.episodes for segment in episode.segments]
    temperature = config.sampling.temperature
    in_reward = config.kl.coef > 0 and config.kl.placement == "reward"

    # Each list is aligned with `segments`; None where this configuration does not read it.
    missing: list[Floats | None] = [None] * len(segments)
    old = learner.score(segments, temperature) if in_reward else missing
    reference = learner.score_reference(segments, temperature) if config.kl.coef else missing
    values = learner.values(segments) if config.algorithm.needs_values else missing
    penalties = [
        kl_penalty(mine, theirs, config.kl.estimator, kl_coef)
        for mine, theirs in zip(old, reference, strict=True)
        if mine is not None and theirs is not None
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

    estimates = config.algorithm.compute_advantages(scored_groups)
    samples = []
    index = 0
    for group, group_estimates in zip(scored_groups, estimates, strict=True):
        for episode, estimate in zip(group.episodes, group_estimates, strict=True):
            returns = estimate.returns or (None,) * len(episode.segments)
            for number, segment in enumerate(episode.segments):
                if segment.mask.any():  # a segment without sampled tokens has nothing to train
                    samples.append(
                        Sample(
                            segment,
                            estimate.advantages[number],
                            temperature,
                            returns=returns[number],
                            reference_logprobs=reference[index],
                            old_logprobs=old[index],
                            name=f"{episode.trajectory.id}#{number}",
                        )
                    )
                index += 1
    return samples
