"""Group relative policy optimisation: a chain is as good as it did better than the others of its task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from agentfly.algorithm import Algorithm, Credit, Group, Needs
from agentfly.algorithms.returns import compared, turn_credit


@dataclass(frozen=True)
class GRPO(Algorithm):
    """(G − mean of the group) / standard deviation of the group, turn by turn (Shao et al., 2024)."""

    needs: ClassVar[Needs] = Needs.GROUPS

    def credit(self, groups: Sequence[Group]) -> list[list[Credit]]:
        return [list(map(turn_credit, group.episodes, compared(group, std=True))) for group in groups]
