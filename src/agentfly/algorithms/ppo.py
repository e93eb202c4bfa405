"""PPO (Schulman et al., 2015, 2017): generalized advantage estimation with a learned critic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from pydantic import Field

from agentfly.algorithms.base import Algorithm, Episode, Group
from agentfly.algorithms.returns import discounted_sum, token_discounts, token_rewards, whiten
from agentfly.errors import RecordError
from agentfly.validation import record


@record(prefix="PPO: ")
class PPO(Algorithm):
    """δ[t] = r[t] + γ·V[t+1] − V[t];  A[t] = δ[t] + γλ·A[t+1];  critic target = A[t] + V[t].

    t counts the sampled tokens across turns, and V[t] is the value of the state before token t. The state after the
    last token of a turn is the one before the first token of the next turn: observations are not discounted through.
    """

    needs_values: ClassVar[bool] = True
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount from one sampled token to the next."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """GAE λ: 1 uses the rewards alone, 0 the one-step critic estimate."""
    whiten: bool = True
    """Whether advantages are normalized to mean 0 and variance 1 over the batch."""

    def compute_advantages(self, groups: Sequence[Group]) -> list[list[Episode]]:
        advantages, returns = [], []
        for episode in (episode for group in groups for episode in group.episodes):
            if episode.values is None and len(episode.turn_index):
                raise RecordError(f"PPO needs a critic's values, and chain {episode.trajectory.id} came without them")
            # None only without sampled tokens
            per_segment = episode.values or episode.scatter_sampled_tokens(np.zeros(0))
            values = episode.gather_sampled_tokens(per_segment).astype(np.float64)  # [sampled]
            next_values = np.append(values[1:], 0.0)[: len(values)]
            discounts = token_discounts(episode, self.gamma)
            deltas = token_rewards(episode) + discounts * next_values - values
            advantages.append(discounted_sum(deltas, self.lam * discounts))
            returns.append(advantages[-1] + values)
        scaled = iter(whiten(advantages) if self.whiten else advantages)
        targets = iter(returns)
        return [
            [episode.with_advantages(next(scaled), next(targets)) for episode in group.episodes] for group in groups
        ]
