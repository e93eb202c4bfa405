"""GDPO (Liu et al., 2026): each of several rewards is normalized within its group before they are added."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from agentfly.algorithms.base import Algorithm, Array, Episode, Group
from agentfly.algorithms.returns import center, whiten_episodes
from agentfly.errors import RecordError
from agentfly.trajectory import TrainingTreatment


@dataclass(frozen=True)
class GDPO(Algorithm):
    """A[i] = whiten(Σ_k w_k · (r_k[i] − mean_i r_k) / (std_i r_k + ε)), with r_k the rewards and w_k their weights.

    GRPO compares the sum instead. A reward of large scale then hides the others, and chains of different rewards with
    the same sum are worth the same. Every turn has the advantage of its chain.
    """

    needs_groups: ClassVar[bool] = True
    needs_components: ClassVar[bool] = True

    def compute_advantages(self, groups: Sequence[Group]) -> list[list[Episode]]:
        rows = [
            np.full(len(episode.turn_index), advantage)
            for group in groups
            for episode, advantage in zip(group.episodes, add_normalized(group.episodes), strict=True)
        ]
        return whiten_episodes(groups, rows)


def add_normalized(episodes: Sequence[Episode]) -> Array:
    """[chains] The weighted sum of each chain's rewards, each normalized over the chains that have it.

    A chain whose treatment is `zero` has 0 for every reward. A reward that abstained from a chain has no part in it.
    """
    chains = [episode.trajectory for episode in episodes]
    is_zero = np.array([chain.treatment is TrainingTreatment.ZERO for chain in chains])
    components = [
        {} if chain.score is None or zero else chain.score.components
        for chain, zero in zip(chains, is_zero, strict=True)
    ]
    for chain, values, zero in zip(chains, components, is_zero, strict=True):
        if not values and not zero:
            raise RecordError(f"chain {chain.id} was scored by one reward, and GDPO compares the values of several")
    total = np.zeros(len(chains))
    weights = {name: component.weight for values in components for name, component in values.items()}
    for name, weight in weights.items():
        is_compared = is_zero | np.array([name in values for values in components])
        column = np.array([values[name].value if name in values else 0.0 for values in components])
        total[is_compared] += weight * center(column[is_compared], std=True)
    return total
