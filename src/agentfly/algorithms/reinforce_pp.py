"""REINFORCE++ (Hu, 2025): returns whitened over the batch, without a critic; with or without a group baseline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from pydantic import Field

from agentfly.algorithms.base import Algorithm, Episode, Group
from agentfly.algorithms.returns import (
    discounted_sum,
    group_relative_returns,
    token_discounts,
    token_rewards,
    whiten_episodes,
)
from agentfly.validation import record


@record(prefix="ReinforcePP: ")
class ReinforcePP(Algorithm):
    """A = whiten(G), with G the discounted return of each token and mean and variance taken over the batch."""

    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount from one sampled token to the next."""

    def compute_advantages(self, groups: Sequence[Group]) -> list[list[Episode]]:
        episodes = [episode for group in groups for episode in group.episodes]
        returns = [discounted_sum(token_rewards(episode), token_discounts(episode, self.gamma)) for episode in episodes]
        return whiten_episodes(groups, returns)


@dataclass(frozen=True)
class ReinforcePPBaseline(Algorithm):
    """A = whiten(G[i, t] − mean_i G[i, t]): the group mean per turn as the baseline, whitened over the batch."""

    needs_groups: ClassVar[bool] = True

    def compute_advantages(self, groups: Sequence[Group]) -> list[list[Episode]]:
        rows = [
            row[episode.turn_index]
            for group in groups
            for episode, row in zip(group.episodes, group_relative_returns(group), strict=True)
        ]
        return whiten_episodes(groups, rows)
