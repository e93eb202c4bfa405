"""GRPO (Shao et al., 2024): advantages are group-normalized returns."""

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

    def turn_advantages(self, group: Group) -> list[Array]:
        return group_relative_returns(group, std=True)
