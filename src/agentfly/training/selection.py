"""Which chains of a step are trained: the failure policy has said so for each when it ended.

    train, zero     in, zero with a reward of 0
    mask            out: it carries no loss and counts in no baseline
    drop_group      out, and all chains of its task with it

A group whose chains all earned the same teaches nothing where chains are compared with one another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from agentfly.algorithm import Episode, SegmentReward
from agentfly.outcome import Treatment
from agentfly.runs.metrics import groups, is_uniform
from agentfly.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class Selection:
    """The groups of a step that are trained, and what became of the others."""

    groups: tuple[tuple[Episode, ...], ...] = ()
    chains: Mapping[str, int] = field(default_factory=dict)
    """How many chains were masked, zeroed, dropped with their group, or left alone in it."""
    flat: int = 0
    """Groups whose chains all earned the same."""

    def __add__(self, other: Selection) -> Selection:
        chains = Counter(self.chains) + Counter(other.chains)
        return Selection(self.groups + other.groups, chains, self.flat + other.flat)


def select(
    trajectories: Iterable[Trajectory], *, least: int, keep_flat: bool, segment_reward: SegmentReward = "broadcast"
) -> Selection:
    """The chains to train, in groups of at least `least`; groups without variance only if they are to be kept."""
    counts: Counter[str] = Counter()
    trained, flat = [], 0
    for chains in groups(trajectories):
        kept = _trained(chains, segment_reward, counts)
        if len(kept) < least:
            counts["alone"] += len(kept)
            continue
        level = len(kept) > 1 and is_uniform(chains)
        flat += level
        if keep_flat or not level:
            trained.append(kept)
    return Selection(tuple(trained), counts, flat)


def _trained(chains: Sequence[Trajectory], rule: SegmentReward, counts: Counter[str]) -> tuple[Episode, ...]:
    if any(chain.treatment is Treatment.DROP_GROUP for chain in chains):
        counts["dropped"] += len(chains)
        return ()
    counts["masked"] += sum(chain.treatment is Treatment.MASK for chain in chains)
    counts["zeroed"] += sum(chain.treatment is Treatment.ZERO for chain in chains)
    return tuple(Episode.of(chain, rule) for chain in chains if chain.treatment is not Treatment.MASK)
