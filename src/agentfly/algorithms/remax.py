"""ReMax (Li et al., 2023): the baseline is the return of the model's greedy chain of the same task."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from agentfly.algorithms.base import Algorithm, Array, Group
from agentfly.algorithms.returns import turn_returns
from agentfly.errors import RecordError


@dataclass(frozen=True)
class ReMax(Algorithm):
    """A[i, t] = G[i, t] − G[greedy, t]; unbiased. A greedy chain that ended earlier counts with its last turn."""

    needs_greedy: ClassVar[bool] = True

    def turn_advantages(self, group: Group) -> list[Array]:
        if group.greedy is None:
            raise RecordError("ReMax compares with a greedy chain of each task, and a group came without one")
        greedy = turn_returns(group.greedy)
        returns = [turn_returns(episode) for episode in group.episodes]
        return [row - greedy[np.minimum(np.arange(len(row)), len(greedy) - 1)] for row in returns]
