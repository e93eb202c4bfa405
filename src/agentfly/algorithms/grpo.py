"""GRPO, Dr. GRPO and RLOO: advantages are returns relative to those of the group's other chains.

GRPO     Shao et al., 2024     divided by the group's standard deviation
DrGRPO   Liu et al., 2025      without the division
RLOO     Ahmadian et al., 2024 REINFORCE leave-one-out: the baseline is the mean of the other chains
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from agentfly.algorithms.base import Algorithm, Array, Group
from agentfly.algorithms.returns import group_relative_returns


@dataclass(frozen=True)
class GRPO(Algorithm):
    """A[i, t] = (G[i, t] − mean_i G[i, t]) / (std_i G[i, t] + ε), with G[i, t] the return of chain i from turn t on.

    With a single reward at the end of each chain this is the published algorithm.
    """

    needs_groups: ClassVar[bool] = True
    takes_branches: ClassVar[bool] = True

    def turn_advantages(self, group: Group) -> list[Array]:
        return group_relative_returns(group, std=True)


@dataclass(frozen=True)
class DrGRPO(Algorithm):
    """A[i, t] = G[i, t] − mean_i G[i, t]: easy and hard tasks weigh as their rewards do.

    The other half of the published algorithm is the loss aggregation "constant".
    """

    needs_groups: ClassVar[bool] = True
    takes_branches: ClassVar[bool] = True

    def turn_advantages(self, group: Group) -> list[Array]:
        return group_relative_returns(group)


@dataclass(frozen=True)
class RLOO(Algorithm):
    """A[i, t] = G[i, t] − mean_{j≠i} G[j, t]; unbiased, since the baseline does not depend on chain i."""

    needs_groups: ClassVar[bool] = True
    takes_branches: ClassVar[bool] = True

    def turn_advantages(self, group: Group) -> list[Array]:
        return group_relative_returns(group, leave_one_out=True)
