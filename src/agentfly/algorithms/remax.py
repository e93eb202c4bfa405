"""ReMax: a chain is as good as it did better than the model's greedy chain of the same task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from agentfly.algorithm import Algorithm, Credit, Group, Needs
from agentfly.algorithms.returns import turn_credit, turn_returns
from agentfly.errors import RecordError


@dataclass(frozen=True)
class ReMax(Algorithm):
    """G − the greedy chain's G, turn by turn (Li et al., 2023); unbiased."""

    needs: ClassVar[Needs] = Needs.GREEDY

    def credit(self, groups: Sequence[Group]) -> list[list[Credit]]:
        return [self._of(group) for group in groups]

    def _of(self, group: Group) -> list[Credit]:
        if group.greedy is None:
            raise RecordError("ReMax compares with a greedy chain of each task, and a group came without one")
        greedy, credits = turn_returns(group.greedy), []
        for episode in group.episodes:
            returns = turn_returns(episode)
            same = np.minimum(np.arange(len(returns)), len(greedy) - 1)
            credits.append(turn_credit(episode, returns - greedy[same]))
        return credits
