"""Products of rewards, and gates. (An agent with several rewards uses their weighted sum.)"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from agentfly.environment import Environment
from agentfly.errors import ConfigError, RewardFault
from agentfly.resources import Leases
from agentfly.scoring import Reward, RewardLike, find_reward, to_score
from agentfly.tooling import Context
from agentfly.trajectory import Score, Trajectory
from agentfly.types import Task


class Product(Reward):
    """The product of several rewards, computed in order; after a zero, the others are not computed."""

    def __init__(self, rewards: Iterable[RewardLike], name: str | None, threshold: float | None = None) -> None:
        """threshold: if given, all parts but the last count as 1 if they reach it, else as 0."""
        self.parts = [find_reward(factor) for factor in rewards]
        if len(self.parts) < 2:
            raise ConfigError(f"a product takes at least two rewards, or their names, not {self.parts!r:.120}")
        self.threshold = threshold
        super().__init__(_reject_call, name=name or "_".join(factor.name for factor in self.parts), timeout=None)

    @property
    def reference(self) -> str:
        return f"{__name__}:{self.name}"

    def check(self, task: Task, used: Iterable[type[Environment]] = ()) -> None:
        for factor in self.parts:
            factor.check(task, used)

    def takes(self, name: str) -> bool:
        return any(factor.takes(name) for factor in self.parts)

    def shadowed_columns(self, task: Task) -> set[str]:
        return set().union(*(factor.shadowed_columns(task) for factor in self.parts))

    def env_parameters(self, task: Task, used: Iterable[type[Environment]]) -> dict[str, type[Environment]]:
        env_classes = (cls for factor in self.parts for cls in factor.env_parameters(task, used).values())
        return {f"{number}": cls for number, cls in enumerate(dict.fromkeys(env_classes))}

    async def score(
        self, trajectory: Trajectory, context: Context, leases: Leases, used: Iterable[type[Environment]] = ()
    ) -> Score:
        """Compute the product; the value of each part is a metric under its name."""
        total = 1.0
        metrics: dict[str, Any] = {}
        for number, factor in enumerate(self.parts, 1):
            try:
                score = await factor.score(trajectory, context, leases, used)
            except RewardFault as fault:
                fault.metrics = {**metrics, **fault.metrics}
                raise
            metrics[factor.name] = score.total
            metrics |= {f"{factor.name}/{name}": value for name, value in score.metrics.items()}
            is_gate = self.threshold is not None and number < len(self.parts)
            total *= float(score.total >= (self.threshold or 0.0)) if is_gate else score.total
            if not total:
                break
        # Factors that are each within the bound may have a product that is not, which fails only this chain.
        return replace(to_score(total, len(trajectory.turns), f"reward {self.name!r}"), metrics=metrics)


def _reject_call() -> float:
    raise ConfigError("a product of rewards needs a chain; call its parts to try them")


def product(*rewards: RewardLike, name: str | None = None) -> Reward:
    """The product of the rewards, computed in order until one is 0."""
    return Product(rewards, name)


def gate(condition: RewardLike, reward: RewardLike, *, threshold: float = 1.0, name: str | None = None) -> Reward:
    """The reward if the condition is at least `threshold`; else 0, without computing the reward."""
    return Product((condition, reward), name, threshold)
