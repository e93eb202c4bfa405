"""Rewards made of rewards. A weighted sum is what an agent makes of several; here are the product and the gate."""

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
    """Several rewards multiplied, in their order. After a zero the others are not asked."""

    def __init__(self, parts: Iterable[RewardLike], name: str | None, least: float | None = None) -> None:
        """`least`: what all parts but the last are asked for; each that has it counts as 1, any other as 0."""
        self.parts = [REWARDS.find(each) if isinstance(each, str) else each for each in parts]
        if len(self.parts) < 2 or not all(isinstance(each, Reward) for each in self.parts):
            raise ConfigError(f"a product takes at least two rewards, or their names, not {self.parts!r:.120}")
        self.least = least
        super().__init__(_scored_by_its_parts, name=name or "_".join(each.name for each in self.parts), timeout=None)

    @property
    def reference(self) -> str:
        return f"{__name__}:{self.name}"

    def check(self, task: Task, used: Iterable[type[Environment]] = ()) -> None:
        for each in self.parts:
            each.check(task, used)

    def env_parameters(self, task: Task, used: Iterable[type[Environment]]) -> dict[str, type[Environment]]:
        kinds = (kind for each in self.parts for kind in each.env_parameters(task, used).values())
        return {f"{number}": kind for number, kind in enumerate(dict.fromkeys(kinds))}

    async def score(
        self, trajectory: Trajectory, context: Context, leases: Leases, used: Iterable[type[Environment]] = ()
    ) -> Score:
        """What the parts give, multiplied; what each one gave is a metric under its name."""
        total, metrics = 1.0, dict[str, Any]()
        for each in self.parts:
            one = await each.score(trajectory, context, leases, used)
            metrics[each.name] = one.total
            metrics |= {f"{each.name}/{name}": value for name, value in one.metrics.items()}
            gates = self.least is not None and each is not self.parts[-1]
            total *= float(one.total >= (self.least or 0.0)) if gates else one.total
            if not total:
                break
        return Score(total, None, metrics)


def _scored_by_its_parts() -> float:
    raise ConfigError("a product of rewards is scored with a chain; call its parts to try them")


def product(*rewards: RewardLike, name: str | None = None) -> Reward:
    """What the rewards give, multiplied: all of them have to be good. Asked in order, until one gives 0."""
    return Product(rewards, name)


def gate(condition: RewardLike, reward: RewardLike, *, least: float = 1.0, name: str | None = None) -> Reward:
    """The reward, where the condition gives at least `least`; else 0, and the reward is not even asked."""
    return Product((condition, reward), name, least)
