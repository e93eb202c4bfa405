"""`@reward`: what a finished chain earned.

A reward asks by parameter name for what it needs: `prediction` (the final answer; `final_response` is another name),
`trajectory`, `messages`, `task`, `context`, an environment by its type (the very instance the chain used), and any
column of the dataset. Asking for something that nobody offers fails before the first token is sampled.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, get_type_hints, overload

from agentfly.environment import Environment
from agentfly.errors import ConfigError, EnvironmentFault, RewardFault
from agentfly.registry import Registry
from agentfly.resources import Leases
from agentfly.threads import call
from agentfly.tooling import Context
from agentfly.trajectory import Score, Trajectory
from agentfly.types import Task

OFFERED = ("prediction", "final_response", "trajectory", "messages", "task", "context")
"""What every reward may ask for; a column of the same name is reached through `task.columns`."""


class Reward:
    """A function of a finished chain. Call it as the function it is; `score` is how a chain calls it."""

    def __init__(self, function: Callable[..., Any], *, name: str | None = None, namespace: Mapping[str, Any] | None = None) -> None:  # fmt: skip
        functools.update_wrapper(self, function)
        self.function = function
        self.name: str = name or function.__name__
        self._namespace = namespace
        REWARDS.add(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<reward {self.name} of {self.function.__module__}.{self.function.__qualname__}>"

    @property
    def reference(self) -> str:
        return f"{self.function.__module__}:{self.function.__qualname__}"

    @functools.cached_property
    def parameters(self) -> dict[str, inspect.Parameter]:
        return dict(inspect.signature(self.function).parameters)

    @functools.cached_property
    def environments(self) -> dict[str, type[Environment]]:
        """Parameters that are environments, by their type hint."""
        hints = get_type_hints(self.function, localns=dict(self._namespace or {}))
        return {n: h for n, h in hints.items() if n != "return" and inspect.isclass(h) and issubclass(h, Environment)}

    def check(self, task: Task, only_environment: type[Environment] | None = None) -> None:
        """Refuse, by name, a parameter that this task does not offer."""
        for name, parameter in self.parameters.items():
            optional = parameter.default is not parameter.empty or parameter.kind in (
                parameter.VAR_KEYWORD,
                parameter.VAR_POSITIONAL,
            )
            known = name in OFFERED or name in self.environments or name in task.columns
            if not known and not optional and not (name == "env" and only_environment is not None):
                offered = sorted({*OFFERED, *task.columns, *(["env"] if only_environment else [])})
                raise ConfigError(f"reward {self.name!r} asks for {name!r}; it may ask for {', '.join(offered)}")

    async def score(
        self,
        trajectory: Trajectory,
        context: Context,
        leases: Leases,
        only_environment: type[Environment] | None = None,
    ) -> Score:
        """Call the reward with what it asks for, and read what it returned."""
        task = trajectory.task
        offer = {
            **task.columns,
            "prediction": trajectory.prediction,
            "final_response": trajectory.prediction,
            "trajectory": trajectory,
            "messages": trajectory.messages,
            "task": task,
            "context": context,
        }
        arguments: dict[str, Any] = {}
        for name, parameter in self.parameters.items():
            kind = self.environments.get(name) or (only_environment if name == "env" and name not in offer else None)
            if kind is not None:
                arguments[name] = await leases.get(kind)
            elif parameter.kind is parameter.VAR_KEYWORD:
                arguments.update({c: v for c, v in task.columns.items() if c not in self.parameters and c not in OFFERED})
            elif name in offer:
                arguments[name] = offer[name]
        try:
            returned = await call(self.function, **arguments)
        except (EnvironmentFault, RewardFault):
            raise
        except Exception as error:
            raise RewardFault(f"reward {self.name!r} failed: {type(error).__name__}: {error}") from error
        return self._read(returned, len(trajectory.turns))

    def _read(self, returned: Any, turns: int) -> Score:
        metrics: dict[str, Any] = {}
        if isinstance(returned, Mapping):
            metrics = dict(returned)
            if "reward" not in metrics:
                raise RewardFault(f"reward {self.name!r} returned a dict without 'reward'; it has {', '.join(map(repr, metrics))}")
            returned = metrics.pop("reward")
        if isinstance(returned, Sequence) and not isinstance(returned, str):
            per_turn = tuple(self._number(value) for value in returned)
            if len(per_turn) != turns:
                raise RewardFault(f"reward {self.name!r} returned {len(per_turn)} numbers for a chain of {turns} turns")
            return Score(math.fsum(per_turn), per_turn, metrics)
        return Score(self._number(returned), None, metrics)

    def _number(self, value: Any) -> float:
        try:
            number = float(value) if not isinstance(value, str) else math.nan
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise RewardFault(
                f"reward {self.name!r} returned {value!r:.80}; it may return a finite number, a list with one number "
                "a turn, or a dict with 'reward' and metrics"
            )
        return number


@overload
def reward(function: Callable[..., Any], /) -> Reward: ...
@overload
def reward(*, name: str | None = None) -> Callable[[Callable[..., Any]], Reward]: ...
def reward(function: Callable[..., Any] | None = None, /, *, name: str | None = None) -> Any:
    """Make a reward of a function; `name` is what its figures are called (None: the function's name)."""
    namespace = sys._getframe(1).f_locals

    def decorate(function: Callable[..., Any]) -> Reward:
        written = getattr(function, "__annotations__", {}).values()
        return Reward(function, name=name, namespace=namespace if any(isinstance(h, str) for h in written) else None)

    return decorate if function is None else decorate(function)


REWARDS: Registry[Reward] = Registry("reward")

RewardLike = Reward | str
RewardSpec = RewardLike | Iterable[RewardLike] | Mapping[RewardLike, float]


class Scorer:
    """The rewards of one agent, each with its weight."""

    def __init__(self, spec: RewardSpec, environments: Iterable[type[Environment]] = ()) -> None:
        """`spec` is a reward or its name, several of them, or a mapping from each to its weight."""
        if isinstance(spec, Reward | str):
            spec = [spec]
        weighted = spec.items() if isinstance(spec, Mapping) else [(each, 1.0) for each in spec]
        self.rewards = [(_find(each), float(weight)) for each, weight in weighted]
        names = [each.name for each, _ in self.rewards]
        if len(set(names)) < len(names):
            raise ConfigError(f"two rewards have one name among {', '.join(names)}; give one another name=")
        kinds = list(dict.fromkeys(environments))
        self._only = kinds[0] if len(kinds) == 1 else None

    def check(self, task: Task) -> None:
        """Refuse what a reward asks for and this task does not offer."""
        for each, _ in self.rewards:
            each.check(task, self._only)

    async def score(self, trajectory: Trajectory, context: Context, leases: Leases) -> Score:
        """All rewards, added up by weight. With several, each one's value is a metric under its name."""
        scores = [(each, weight, await each.score(trajectory, context, leases, self._only)) for each, weight in self.rewards]
        if len(scores) == 1:
            each, weight, only = scores[0]
            return only if weight == 1.0 else _weighted(only, weight)
        metrics: dict[str, Any] = {}
        total, per_turn = 0.0, [0.0] * len(trajectory.turns)
        for each, weight, one in scores:
            metrics[each.name] = one.total
            metrics.update({f"{each.name}/{name}": value for name, value in one.metrics.items()})
            total += weight * one.total
            for turn, value in enumerate(one.per_turn or ()):
                per_turn[turn] += weight * value
            if one.per_turn is None and per_turn:
                per_turn[-1] += weight * one.total  # what was earned by the whole chain is earned at its end
        return Score(total, tuple(per_turn) if any(s.per_turn for _, _, s in scores) else None, metrics)


def _weighted(score: Score, weight: float) -> Score:
    per_turn = None if score.per_turn is None else tuple(weight * value for value in score.per_turn)
    return Score(weight * score.total, per_turn, score.metrics)


def _find(given: RewardLike) -> Reward:
    if isinstance(given, str):
        return REWARDS.find(given)
    if not isinstance(given, Reward):
        raise ConfigError(f"{given!r} is no reward; decorate the function with @reward, or pass a reward's name")
    return given
