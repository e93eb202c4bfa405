"""Which chains of a step are trained: the rule that the trainer applies and the viewer explains.

A chain's `treatment`, decided when it ended, says whether it is trained:

    train, zero     yes; zero with a reward of 0
    mask            no: it carries no loss and enters no baseline
    drop_group      no, and neither is any other chain of its task

A group whose chains all have the same reward has no signal where chains are compared within a group.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from agentfly.algorithms.base import Episode, SegmentReward
from agentfly.runs.metrics import groups, is_uniform
from agentfly.training.config import TrainConfig
from agentfly.trajectory import TrainingTreatment, Trajectory


class Exclusion(enum.Enum):
    """Why a chain is not trained."""

    DROPPED = "dropped", "The failure policy removes the whole group where one of its chains has treatment drop_group."
    MASKED = "masked", "The failure policy gave this chain treatment mask: no loss, and no part in the baseline."
    ALONE = "alone", "Too few chains of this group are left to compare with each other."
    ZERO_VARIANCE = (
        "zero_variance",
        "All chains of this group have the same return, so that every advantage would be zero; zero_variance leaves "
        "such groups out.",
    )

    def __init__(self, metric: str, rule: str) -> None:
        self.metric = metric
        self.rule = rule
        """The rule as a sentence."""


def find_exclusions(
    group: Sequence[Trajectory], *, min_chains: int, keep_zero_variance: bool
) -> list[Exclusion | None]:
    """For each chain of a group: why it is not trained, or None if it is."""
    treatments = Counter(chain.treatment for chain in group)
    if treatments[TrainingTreatment.DROP_GROUP]:
        return [Exclusion.DROPPED] * len(group)
    # A chain with treatment zero counts here: it is compared with the others, with a reward of 0.
    compared = len(group) - treatments[TrainingTreatment.MASK]
    reason = None
    if compared < min_chains:
        reason = Exclusion.ALONE
    elif compared > 1 and not keep_zero_variance and is_uniform(group):
        reason = Exclusion.ZERO_VARIANCE
    return [Exclusion.MASKED if chain.treatment is TrainingTreatment.MASK else reason for chain in group]


@dataclass(frozen=True, slots=True)
class Selection:
    """The groups of a step that are trained, and counts of the others."""

    groups: tuple[tuple[Episode, ...], ...] = ()
    chains: Mapping[str, int] = field(default_factory=dict)
    """Chains that were masked, zeroed, dropped with their group, or left alone in it."""
    zero_variance: int = 0
    """Groups whose chains all have the same reward."""

    @property
    def metrics(self) -> dict[str, float]:
        """The counts, by the name of their metric."""
        return {
            **{f"selection/{name}": float(count) for name, count in self.chains.items()},
            "selection/groups": float(len(self.groups)),
            "selection/zero_variance_groups": float(self.zero_variance),
        }

    def __add__(self, other: Selection) -> Selection:
        chains = Counter(self.chains) + Counter(other.chains)
        return Selection(self.groups + other.groups, chains, self.zero_variance + other.zero_variance)


def select_groups(
    trajectories: Iterable[Trajectory],
    *,
    min_chains: int,
    keep_zero_variance: bool,
    segment_reward: SegmentReward = "broadcast",
) -> Selection:
    """Select the chains to train, in groups of at least `min_chains`."""
    counts: Counter[str] = Counter()
    selected = []
    zero_variance = 0
    for chains in groups(trajectories):
        reasons = find_exclusions(chains, min_chains=min_chains, keep_zero_variance=keep_zero_variance)
        counts.update(reason.metric for reason in reasons if reason not in (None, Exclusion.ZERO_VARIANCE))
        if Exclusion.DROPPED in reasons:
            continue
        counts["zeroed"] += sum(chain.treatment is TrainingTreatment.ZERO for chain in chains)
        # Counted whether or not such groups are kept: the metric says how hard the tasks are.
        if Exclusion.ALONE not in reasons:
            compared = sum(reason is not Exclusion.MASKED for reason in reasons)
            zero_variance += compared > 1 and is_uniform(chains)
        episodes = tuple(
            Episode.from_trajectory(chain, segment_reward)
            for chain, reason in zip(chains, reasons, strict=True)
            if reason is None
        )
        if episodes:
            selected.append(episodes)
    return Selection(tuple(selected), counts, zero_variance)


def select_chains(chains: Iterable[Trajectory], config: TrainConfig) -> Selection:
    """Select the chains to train by the rules of a configuration."""
    return select_groups(
        chains,
        min_chains=config.min_chains,
        keep_zero_variance=config.zero_variance_rule == "keep",
        segment_reward=config.segment_reward,
    )


def select_greedy(chains: Iterable[Trajectory], config: TrainConfig) -> dict[int, Episode]:
    """The greedy chains that can serve as a baseline, by group."""
    # A greedy chain is a baseline and is not trained itself, so one per group is enough, and needs no variance.
    selection = select_groups(chains, min_chains=1, keep_zero_variance=True, segment_reward=config.segment_reward)
    return {episode.trajectory.group: episode for (episode,) in selection.groups}
