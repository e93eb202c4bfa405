"""GiGPO (Feng et al., 2025): GRPO plus a comparison of turns that began in the same environment state."""

from __future__ import annotations

import json
from collections.abc import Hashable
from typing import ClassVar

import numpy as np
from pydantic import Field

from agentfly.algorithms.base import Algorithm, Array, Episode, Group
from agentfly.algorithms.returns import center, group_relative_returns, turn_returns
from agentfly.segment import require_json
from agentfly.validation import record


@record(prefix="GiGPO: ")
class GiGPO(Algorithm):
    """A[i, t] = A_chain[i, t] + weight · A_step[i, t].

    A_chain is GRPO's advantage. A_step is the same normalization of discounted returns over all turns of the group
    that share an anchor state.
    """

    needs_groups: ClassVar[bool] = True
    weight: float = Field(default=1.0, ge=0)
    """Weight of the step advantage beside the chain advantage."""
    gamma: float = Field(default=0.95, ge=0, le=1)
    """Discount per turn in the step advantage: below 1, the shorter way from a state is the better one."""
    std: bool = True
    """Whether both advantages are divided by the standard deviation."""

    def turn_advantages(self, group: Group) -> list[Array]:
        returns = [turn_returns(episode, self.gamma) for episode in group.episodes]
        by_state: dict[Hashable, list[tuple[int, int]]] = {}
        for chain, episode in enumerate(group.episodes):
            for turn, state in enumerate(anchor_states(episode)):
                by_state.setdefault(state, []).append((chain, turn))
        steps = [np.zeros_like(row) for row in returns]
        for turns in by_state.values():
            values = np.array([returns[chain][turn] for chain, turn in turns])
            for (chain, turn), advantage in zip(turns, center(values, std=self.std), strict=True):
                steps[chain][turn] = advantage
        chains = group_relative_returns(group, std=self.std)
        return [whole + self.weight * step for whole, step in zip(chains, steps, strict=True)]


def anchor_states(episode: Episode) -> list[Hashable]:
    """The state each turn began in.

    The first turn's is the task; a later turn's is the `state` that a tool returned beside its observation in the turn
    before (as JSON), or else the tokens between the last sampled token and the turn. A turn without tokens has a state
    that equals no other.
    """
    observations: dict[int, bytes] = {}
    for segment in episode.segments:
        sampled = np.flatnonzero(segment.mask)
        for first in np.flatnonzero(np.diff(segment.turns[sampled], prepend=-1)):
            begin = sampled[first - 1] + 1 if first else 0
            observations[int(segment.turns[sampled[first]])] = segment.tokens[begin : sampled[first]].tobytes()
    states: list[Hashable] = ["task"]
    for turn in range(1, len(episode.rewards)):
        calls = [call for call in episode.trajectory.turns[turn - 1].calls if "state" in call.info]
        if calls:
            info = require_json(calls[-1].info, f"info of tool {calls[-1].name!r}")
            states.append(json.dumps(info["state"], sort_keys=True))
        else:
            states.append(observations.get(turn, object()))
    return states
