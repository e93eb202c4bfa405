"""REINFORCE++: no critic and no groups; what each token led to, measured against all tokens of the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from agentfly.algorithm import Algorithm, Credit, Episode, Group, Needs
from agentfly.algorithms.returns import Numbers, accumulate, compared, token_factors, token_rewards, whitened


@dataclass(frozen=True)
class ReinforcePP(Algorithm):
    """The discounted return of each token, whitened over the batch (Hu, 2025)."""

    gamma: float = 1.0
    """Discount from one sampled token to the next."""

    def credit(self, groups: Sequence[Group]) -> list[list[Credit]]:
        return whitened_credits(groups, [[self._returns(each) for each in group.episodes] for group in groups])

    def _returns(self, episode: Episode) -> Numbers:
        return accumulate(token_rewards(episode), token_factors(episode, self.gamma))


@dataclass(frozen=True)
class ReinforcePPBaseline(Algorithm):
    """G − mean of the group, turn by turn, whitened over the tokens of the batch."""

    needs: ClassVar[Needs] = Needs.GROUPS

    def credit(self, groups: Sequence[Group]) -> list[list[Credit]]:
        rows = [
            [row[each.turns] for each, row in zip(group.episodes, compared(group), strict=True)] for group in groups
        ]
        return whitened_credits(groups, rows)


def whitened_credits(groups: Sequence[Group], rows: Sequence[Sequence[Numbers]]) -> list[list[Credit]]:
    """The credits of numbers for the sampled tokens of each episode, whitened over them all."""
    scaled = iter(whitened([row for of_group in rows for row in of_group]))
    return [[Credit(episode.spread(next(scaled))) for episode in group.episodes] for group in groups]
