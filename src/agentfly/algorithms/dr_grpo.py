"""Dr. GRPO: the group's mean taken away and nothing else, so easy and hard tasks weigh as their rewards do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from agentfly.algorithm import Algorithm, Credit, Group, Needs
from agentfly.algorithms.returns import compared, turn_credit


@dataclass(frozen=True)
class DrGRPO(Algorithm):
    """G − mean of the group, turn by turn (Liu et al., 2025). Its other half is the aggregation "constant"."""

    needs: ClassVar[Needs] = Needs.GROUPS

    def credit(self, groups: Sequence[Group]) -> list[list[Credit]]:
        return [list(map(turn_credit, group.episodes, compared(group))) for group in groups]
