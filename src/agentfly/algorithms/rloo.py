"""RLOO, REINFORCE leave-one-out (Ahmadian et al., 2024): the baseline is the mean of the group's other chains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from agentfly.algorithms.base import Algorithm, Array, Group
from agentfly.algorithms.returns import group_relative_returns


@dataclass(frozen=True)
class RLOO(Algorithm):
    """A[i, t] = G[i, t] − mean_{j≠i} G[j, t]; unbiased, since the baseline does not depend on chain i."""

    needs_groups: ClassVar[bool] = True

    def turn_advantages(self, group: Group) -> list[Array]:
        n = len(group.episodes)
        scale = n / max(n - 1, 1)  # x − mean of the others = n/(n−1) · (x − mean of all)
        return [scale * row for row in group_relative_returns(group)]
