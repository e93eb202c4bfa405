"""Dr. GRPO (Liu et al., 2025): GRPO without the division by the standard deviation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from agentfly.algorithms.base import Algorithm, Array, Group
from agentfly.algorithms.returns import group_relative_returns


@dataclass(frozen=True)
class DrGRPO(Algorithm):
    """A[i, t] = G[i, t] − mean_i G[i, t]: easy and hard tasks weigh as their rewards do.

    The other half of the published algorithm is the loss aggregation "constant".
    """

    needs_groups: ClassVar[bool] = True

    def turn_advantages(self, group: Group) -> list[Array]:
        return group_relative_returns(group)
