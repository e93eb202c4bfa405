"""`@reward`: what a finished chain earned.

A reward asks by parameter name for what it needs: `prediction` (the final answer; `final_response` is another name),
`trajectory`, `messages`, `task`, `context`, an environment by its type (the very instance the chain used), and any
column of the dataset. Asking for something that nobody offers fails before the first token is sampled.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, overload

from agentfly.environment import Environment, meant
from agentfly.errors import ConfigError, EnvironmentFault, RewardFault, describe
from agentfly.outcome import Score
from agentfly.recording import plain
from agentfly.registry import Registry
from agentfly.resources import Leases
from agentfly.schema import names_in_sight, type_hints
from agentfly.threads import call
from agentfly.tooling import Context
from agentfly.trajectory import Trajectory
from agentfly.types import Task

TIMEOUT = 600.0
MAX_PREDICTION = 131_072
"""Characters of a prediction that rewards read: the last ones, about 32k tokens. It bounds the time and memory that one
reply can cost; `trajectory` and `messages` hold the whole record."""

OFFERED = ("prediction", "final_response", "trajectory", "messages", "task", "context")
"""What every reward may ask for; a column of the same name is reached through `task.columns`."""


class Reward:
    """A function of a finished chain. Call it as the function it is; `score` is how a chain calls it."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        timeout: float | None = TIMEOUT,
        names: Mapping[str, Any] | None = None,
    ) -> None:
        """`names` are local names that string type hints may use; the other settings are those of `reward`."""
        if not callable(function) or not hasattr(function, "__qualname__") or isinstance(function, type | Reward):
            raise ConfigError(f"{function!r} cannot be made a reward: decorate a function or an async function")
        functools.update_wrapper(self, function)
        self.function = function
        self.name: str = name or function.__name__
        self.timeout, self._names = timeout, names or {}
        self.parameters = dict(inspect.signature(function).parameters)
        for each in self.parameters.values():
            if each.kind is each.POSITIONAL_ONLY:
                raise ConfigError(f"reward {self.name!r}: {each.name!r} is given by name, so it cannot be before a `/`")
        if timeout is not None and timeout <= 0:
            raise ConfigError(f"reward {self.name!r}: timeout must be above 0, not {timeout}; None means no limit")
        REWARDS.add(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<reward {self.name} of {self.reference}>"

    @property
    def reference(self) -> str:
        return f"{self.function.__module__}:{self.function.__qualname__}"

    @functools.cached_property
    def environments(self) -> dict[str, type[Environment]]:
        """Parameters that are environments, by their type hint."""
        hints = type_hints(self.function, self._names)
        return {name: hint for name, hint in hints.items() if inspect.isclass(hint) and issubclass(hint, Environment)}

    def check(self, task: Task, used: Iterable[type[Environment]] = ()) -> None:
        """Refuse, by name, a parameter that this task does not offer. `used` are the agent's environments."""
        for name, parameter in self.parameters.items():
            optional = parameter.default is not parameter.empty
            if optional or parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                continue
            if name not in OFFERED and name not in task.columns and self._environment(name, task, used) is None:
                offered = sorted({*OFFERED, *task.columns, *(["env"] if used else [])})
                raise ConfigError(f"reward {self.name!r} asks for {name!r}; it may ask for {', '.join(offered)}")

    def _environment(self, name: str, task: Task, used: Iterable[type[Environment]]) -> type[Environment] | None:
        """The environment that a parameter asks for: by its type, or, for a bare `env`, the one there is."""
        kind = self.environments.get(name)
        if kind is None and name == "env" and name not in task.columns and used:
            kind = Environment
        return kind and meant(kind, used, f"reward {self.name!r}")

    async def score(
        self, trajectory: Trajectory, context: Context, leases: Leases, used: Iterable[type[Environment]] = ()
    ) -> Score:
        """Call the reward with what it asks for, and read what it returned."""
        arguments = self._arguments(trajectory, context)
        acted_in = self.acted_in(trajectory.task, used)

        async def run(lent: Mapping[type[Environment], Environment]) -> Any:
            return await call(self.function, **arguments, **{name: lent[kind] for name, kind in acted_in.items()})

        for kind in acted_in.values():
            await leases.get(kind)  # the time a chain waits for an instance is not the reward's
        limit = asyncio.timeout(self.timeout)
        try:
            async with limit:
                returned = await (leases.act(tuple(set(acted_in.values())), run) if acted_in else run({}))
            return self._read(returned, len(trajectory.turns))
        except (EnvironmentFault, RewardFault):
            raise
        except Exception as error:
            wrong = f"took longer than {self.timeout:g} s" if limit.expired() else f"failed: {describe(error)}"
            raise RewardFault(f"reward {self.name!r} {wrong}") from error

    def acted_in(self, task: Task, used: Iterable[type[Environment]]) -> dict[str, type[Environment]]:
        """The parameters that are environments, for a chain of this task."""
        kinds = {name: self._environment(name, task, used) for name in self.parameters}
        return {name: kind for name, kind in kinds.items() if kind is not None}

    def _arguments(self, trajectory: Trajectory, context: Context) -> dict[str, Any]:
        task, prediction = trajectory.task, trajectory.prediction[-MAX_PREDICTION:]
        offer = {
            **task.columns,
            "prediction": prediction,
            "final_response": prediction,
            "trajectory": trajectory,
            "messages": trajectory.messages,
            "task": task,
            "context": context,
        }
        arguments: dict[str, Any] = {}
        for name, parameter in self.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                unasked = task.columns.keys() - self.parameters.keys() - set(OFFERED)
                arguments.update({column: task.columns[column] for column in unasked})
            elif parameter.kind is parameter.VAR_POSITIONAL:
                continue
            elif name in offer and name not in self.environments:
                arguments[name] = offer[name]
        return arguments

    def _read(self, returned: Any, turns: int) -> Score:
        metrics: dict[str, Any] = {}
        if isinstance(returned, Mapping):
            metrics = dict(returned)
            if "reward" not in metrics:
                has = ", ".join(map(repr, metrics)) or "nothing"
                raise RewardFault(f"reward {self.name!r} returned a dict without 'reward'; it has {has}")
            returned, metrics = metrics.pop("reward"), plain(metrics)
        if getattr(returned, "ndim", 0):  # an array of numbers, as numpy and torch make them
            returned = returned.tolist()
        if isinstance(returned, Sequence) and not isinstance(returned, str | bytes):
            per_turn = tuple(self._number(value) for value in returned)
            if len(per_turn) != turns:
                raise RewardFault(f"reward {self.name!r} returned {len(per_turn)} numbers for a chain of {turns} turns")
            return Score(sum(per_turn), per_turn, metrics)
        return Score(self._number(returned), None, metrics)

    def _number(self, value: Any) -> float:
        try:
            number = math.nan if isinstance(value, str | bytes | bytearray) else float(value)
        except Exception:
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
def reward(*, name: str | None = None, timeout: float | None = TIMEOUT) -> Callable[[Callable[..., Any]], Reward]: ...
def reward(function: Callable[..., Any] | None = None, /, **settings: Any) -> Any:
    """Make a reward of a function or an async function.

    Args:
        function: The function, when the decorator is used bare.
        name: What its figures are called; None takes the function's name.
        timeout: Seconds it may take; None means no limit.
    """
    frame = sys._getframe(1)

    def decorate(function: Callable[..., Any]) -> Reward:
        return Reward(function, names=names_in_sight(frame, function), **settings)

    return decorate if function is None else decorate(function)


REWARDS: Registry[Reward] = Registry("reward")

RewardLike = Reward | str
RewardSpec = RewardLike | Iterable[RewardLike] | Mapping[RewardLike, float]


class Scorer:
    """The rewards of one agent, each with its weight."""

    def __init__(self, spec: RewardSpec, environments: Iterable[type[Environment]] = ()) -> None:
        """`spec` is a reward or its name, several of them, or a mapping from each to its weight."""
        if isinstance(spec, str) or callable(spec):
            spec = [spec]
        weighted = spec.items() if isinstance(spec, Mapping) else [(each, 1.0) for each in spec]
        self.rewards = [(_find(each), _weight(each, weight)) for each, weight in weighted]
        names = [each.name for each, _ in self.rewards]
        if not names:
            raise ConfigError("an empty list of rewards; give one, or reward=None")
        if len(set(names)) < len(names):
            raise ConfigError(f"two rewards have one name among {', '.join(names)}; give one another name=")
        self._used = tuple(dict.fromkeys(environments))

    def check(self, task: Task) -> None:
        """Refuse what a reward asks for and this task does not offer."""
        for each, _ in self.rewards:
            each.check(task, self._used)

    def environments(self, task: Task) -> Iterable[type[Environment]]:
        """What the rewards of a chain of this task act in."""
        return (kind for each, _ in self.rewards for kind in each.acted_in(task, self._used).values())

    async def score(self, trajectory: Trajectory, context: Context, leases: Leases) -> Score:
        """All rewards, added up by weight. With several, each one's value is a metric under its name."""
        scores = [(r, weight, await r.score(trajectory, context, leases, self._used)) for r, weight in self.rewards]
        if len(scores) == 1:
            _, weight, only = scores[0]
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
        return Score(total, tuple(per_turn) if any(s.per_turn is not None for _, _, s in scores) else None, metrics)


def _weighted(score: Score, weight: float) -> Score:
    per_turn = None if score.per_turn is None else tuple(weight * value for value in score.per_turn)
    return Score(weight * score.total, per_turn, score.metrics)


def _weight(given: RewardLike, weight: Any) -> float:
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
        raise ConfigError(f"the weight of reward {given!r} is {weight!r}; it must be a finite number")
    return float(weight)


def _find(given: RewardLike) -> Reward:
    if isinstance(given, str):
        return REWARDS.find(given)
    if not isinstance(given, Reward):
        raise ConfigError(f"{given!r} is no reward; decorate the function with @reward, or pass a reward's name")
    return given
