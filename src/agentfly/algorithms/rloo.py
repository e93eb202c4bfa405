"""REINFORCE leave-one-out: each chain is measured against the mean of the others, which it had no part in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from agentfly.algorithm import Algorithm, Credit, Group, Needs
from agentfly.algorithms.returns import compared, turn_credit


@dataclass(frozen=True)
class RLOO(Algorithm):
    """G − mean of the other chains, turn by turn (Ahmadian et al., 2024); unbiased."""

    needs: ClassVar[Needs] = Needs.GROUPS

    def credit(self, groups: Sequence[Group]) -> list[list[Credit]]:
        return [self._of(group) for group in groups]

    def _of(self, group: Group) -> list[Credit]:
        n = len(group.episodes)
        scale = n / max(n - 1, 1)  # x − mean of the others = n/(n−1) · (x − mean of all)
        return [turn_credit(episode, scale * row) for episode, row in zip(group.episodes, compared(group), strict=True)]
