"""Which chains of a training step are trained: the rule that the trainer applies and the viewer explains."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Sequence

from agentfly.runs.metrics import is_uniform
from agentfly.trajectory import TrainingTreatment, Trajectory


class Exclusion(enum.Enum):
    """Why a chain is not trained."""

    DROPPED = "dropped"
    MASKED = "masked"
    ALONE = "alone"
    ZERO_VARIANCE = "zero_variance"

    @property
    def rule(self) -> str:
        """The rule as a sentence."""
        return _RULES[self]


_RULES = {
    Exclusion.DROPPED: "The failure policy removes the whole group where one of its chains has treatment drop_group.",
    Exclusion.MASKED: "The failure policy gave this chain treatment mask: no loss, and no part in the baseline.",
    Exclusion.ALONE: "Too few chains of this group are left to compare with each other.",
    Exclusion.ZERO_VARIANCE: "All chains of this group have the same return, so that every advantage would be zero; "
    "zero_variance leaves such groups out.",
}


def find_exclusions(
    group: Sequence[Trajectory], *, min_chains: int, keep_zero_variance: bool
) -> list[Exclusion | None]:
    """For each chain of a group: why it is not trained, or None if it is."""
    treatments = Counter(chain.treatment for chain in group)
    if treatments[TrainingTreatment.DROP_GROUP]:
        return [Exclusion.DROPPED] * len(group)
    compared = len(group) - treatments[TrainingTreatment.MASK]
    reason = None
    if compared < min_chains:
        reason = Exclusion.ALONE
    elif compared > 1 and not keep_zero_variance and is_uniform(group):
        reason = Exclusion.ZERO_VARIANCE
    return [Exclusion.MASKED if chain.treatment is TrainingTreatment.MASK else reason for chain in group]
