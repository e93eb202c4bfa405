"""Rewards composed of rewards: product and gate. A weighted sum is what an agent makes of several rewards."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from agentfly.environment import Environment
from agentfly.errors import ConfigError
from agentfly.resources import Leases
from agentfly.scoring import REWARDS, Reward, RewardLike
from agentfly.tooling import Context
from agentfly.trajectory import Score, Trajectory
from agentfly.types import Task


class Product(Reward):
    """The product of several rewards, computed in order; after a zero the remaining ones are skipped."""

    def __init__(self, parts: Iterable[RewardLike], name: str | None, least: float | None = None) -> None:
        """`least`: threshold for all parts but the last; such a part counts as 1 if it reaches it, else as 0."""
        self.parts = [REWARDS.find(each) if isinstance(each, str) else each for each in parts]
        if len(self.parts) < 2 or not all(isinstance(each, Reward) for each in self.parts):
            raise ConfigError(f"a product takes at least two rewards, or their names, not {self.parts!r:.120}")
        self.least = least
        super().__init__(_raise_not_callable, name=name or "_".join(each.name for each in self.parts), timeout=None)

    @property
    def reference(self) -> str:
        return f"{__name__}:{self.name}"

    def check(self, task: Task, used: Iterable[type[Environment]] = ()) -> None:
        for each in self.parts:
            each.check(task, used)

    def env_parameters(self, task: Task, used: Iterable[type[Environment]]) -> dict[str, type[Environment]]:
        classes = (cls for each in self.parts for cls in each.env_parameters(task, used).values())
        return {f"{number}": cls for number, cls in enumerate(dict.fromkeys(classes))}

    async def score(
        self, trajectory: Trajectory, context: Context, leases: Leases, used: Iterable[type[Environment]] = ()
    ) -> Score:
        """Multiply the scores of the parts; each score is also a metric under the part's name."""
        total, metrics = 1.0, dict[str, Any]()
        for each in self.parts:
            score = await each.score(trajectory, context, leases, used)
            metrics[each.name] = score.total
            metrics |= {f"{each.name}/{name}": value for name, value in score.metrics.items()}
            is_gate = self.least is not None and each is not self.parts[-1]
            total *= float(score.total >= (self.least or 0.0)) if is_gate else score.total
            if not total:
                break
        return Score(total, None, metrics)


def _raise_not_callable() -> float:
    raise ConfigError("a product of rewards needs a chain; call its parts to try them")


def product(*rewards: RewardLike, name: str | None = None) -> Reward:
    """Multiply rewards. They are computed in order until one is 0."""
    return Product(rewards, name)


def gate(condition: RewardLike, reward: RewardLike, *, least: float = 1.0, name: str | None = None) -> Reward:
    """Return the reward if the condition reaches `least`; otherwise 0, without computing the reward."""
    return Product((condition, reward), name, least)
