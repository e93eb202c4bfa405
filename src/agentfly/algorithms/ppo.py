"""Proximal policy optimisation: a learned critic says what was to be expected before each token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from agentfly.algorithm import Algorithm, Credit, Episode, Group, Needs
from agentfly.algorithms.returns import Numbers, accumulate, token_factors, token_rewards, whitened
from agentfly.errors import RecordError


@dataclass(frozen=True)
class PPO(Algorithm):
    """Generalised advantage estimation over the model's own tokens, across turns (Schulman et al., 2015, 2017).

    The value of a state is that before the token. From the last token of a turn the next state is the one before the
    first token of the next turn: what tools wrote between them takes no time and is not discounted through.
    """

    needs: ClassVar[Needs] = Needs.VALUES
    gamma: float = 1.0
    """Discount from one sampled token to the next."""
    lam: float = 1.0
    """1 trusts the rewards alone, 0 the critic alone."""
    whiten: bool = True
    """Whether advantages are shifted and scaled to mean 0 and variance 1 over the batch."""

    def credit(self, groups: Sequence[Group]) -> list[list[Credit]]:
        episodes = [episode for group in groups for episode in group.episodes]
        values = [_values(episode) for episode in episodes]
        raw = list(map(self._advantages, episodes, values))
        advantages = whitened(raw) if self.whiten else raw
        credits = iter(map(_credit, episodes, advantages, raw, values))
        return [[next(credits) for _ in group.episodes] for group in groups]

    def _advantages(self, episode: Episode, values: Numbers) -> Numbers:
        factors = token_factors(episode, self.gamma)
        surprises = token_rewards(episode) + factors * np.append(values[1:], 0.0)[: len(values)] - values
        return accumulate(surprises, self.lam * factors)


def _values(episode: Episode) -> Numbers:
    if episode.values is None and len(episode.turns):
        raise RecordError(f"PPO needs a critic's values, and chain {episode.trajectory.id} came without them")
    return episode.sampled(episode.values or episode.spread(np.zeros(0))).astype(np.float64)


def _credit(episode: Episode, advantages: Numbers, raw: Numbers, values: Numbers) -> Credit:
    return Credit(episode.spread(advantages), returns=episode.spread(raw + values))
