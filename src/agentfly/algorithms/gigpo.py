"""GiGPO: groups within groups. Turns of a task's chains that began in the same state are compared with one another."""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from agentfly.algorithm import Algorithm, Credit, Episode, Group, Needs
from agentfly.algorithms.returns import Numbers, centred, compared, turn_credit, turn_returns
from agentfly.recording import kept


@dataclass(frozen=True)
class GiGPO(Algorithm):
    """What GRPO says of the chain plus what the same comparison says of the turn (Feng et al., 2025)."""

    needs: ClassVar[Needs] = Needs.GROUPS
    weight: float = 1.0
    """Of the turns' comparison beside the chains'."""
    gamma: float = 0.95
    """Discount from turn to turn in the turns' comparison: below 1, the shorter way from a state is the better one."""
    std: bool = True
    """Whether differences are divided by the standard deviation of those compared."""

    def credit(self, groups: Sequence[Group]) -> list[list[Credit]]:
        return [self._of(group) for group in groups]

    def _of(self, group: Group) -> list[Credit]:
        of_chains, of_turns = compared(group, std=self.std), self._turns(group)
        rows = [whole + self.weight * step for whole, step in zip(of_chains, of_turns, strict=True)]
        return list(map(turn_credit, group.episodes, rows))

    def _turns(self, group: Group) -> list[Numbers]:
        returns = [turn_returns(episode, self.gamma) for episode in group.episodes]
        met: dict[Hashable, list[tuple[int, int]]] = {}
        for chain, episode in enumerate(group.episodes):
            for turn, state in enumerate(anchors(episode)):
                met.setdefault(state, []).append((chain, turn))
        out = [np.zeros_like(each) for each in returns]
        for places in met.values():
            together = np.array([returns[chain][turn] for chain, turn in places])
            for (chain, turn), number in zip(places, centred(together, std=self.std), strict=True):
                out[chain][turn] = number
        return out


def anchors(episode: Episode) -> list[Hashable]:
    """The state each turn began in: the task, then the `state` that a tool returned last turn, or else what was shown.

    What was shown is the tokens between what the model said last and its turn. A turn without tokens has a state of
    its own, which equals no other.
    """
    shown = _shown(episode)
    first: list[Hashable] = ["task"]
    return first + [_state(episode, turn - 1) or shown.get(turn, object()) for turn in range(1, len(episode.rewards))]


def _state(episode: Episode, turn: int) -> str | None:
    """The `state` that a tool returned beside its observation in a turn, as text; None where none did."""
    calls = [call for call in episode.trajectory.turns[turn].calls if "state" in call.info]
    if not calls:
        return None
    return json.dumps(kept(calls[-1].info, f"info of tool {calls[-1].name!r}")["state"], sort_keys=True)


def _shown(episode: Episode) -> dict[int, bytes]:
    """For each turn that was sampled, the tokens right before it."""
    out: dict[int, bytes] = {}
    for piece in episode.pieces:
        sampled = np.flatnonzero(piece.mask)
        for first in np.flatnonzero(np.diff(piece.turns[sampled], prepend=-1)):
            begin = sampled[first - 1] + 1 if first else 0
            out[int(piece.turns[sampled[first]])] = piece.tokens[begin : sampled[first]].tobytes()
    return out
