"""`@reward`: a function that scores a finished chain.

A reward's parameters are filled by name: `prediction` (the final answer; `final_response` is another name),
`trajectory`, `messages`, `task`, `context`, an environment by its type (the instance that the chain used), and any
column of the dataset. An unknown parameter is a ConfigError before the first token is sampled.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
import math
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, overload

from agentfly import plugins
from agentfly.environment import Environment, resolve_env_class
from agentfly.errors import ConfigError, EnvironmentFault, RecordError, RewardFault, describe
from agentfly.resources import Leases
from agentfly.segment import to_plain
from agentfly.threads import LoopTimer, call, run_within
from agentfly.tooling import Context
from agentfly.tooling.schema import caller_namespace, type_hints
from agentfly.trajectory import MAX_REWARD, Score, ScoreComponent, Trajectory
from agentfly.types import Task
from agentfly.validation import FiniteFloat, PositiveFloat, validate

_LOG = logging.getLogger(__name__)
TIMEOUT = 600.0
MAX_PREDICTION = 131_072
"""Rewards receive this many characters of a prediction, the last ones (about 32k tokens). It bounds the time and memory
of scoring one reply; `trajectory` and `messages` hold all of it."""

OFFERED = ("prediction", "final_response", "trajectory", "messages", "task", "context")
"""Parameters that every reward may have; a column of the same name is available as `task.columns[name]`."""
_OFFERED_TYPES = {
    "prediction": str, "final_response": str, "trajectory": Trajectory, "task": Task, "context": Context,
}  # fmt: skip


_FOREIGN_PARAMETERS = {
    "completions": "TRL", "completion_ids": "TRL", "prompts": "TRL", "solution_str": "verl", "solution_strs": "verl",
}  # fmt: skip
"""Parameters of rewards that no reward here has, and whose they are."""


def _accepts(hint: Any, offered: type) -> bool:
    """Whether a parameter of this type hint can receive a value of type `offered`; True where that is not known."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_accepts(option, offered) for option in typing.get_args(hint))
    if origin is typing.Annotated:
        return _accepts(typing.get_args(hint)[0], offered)
    expected = origin or hint
    return not inspect.isclass(expected) or expected is Any or issubclass(offered, expected)


class Abstention(RewardFault):
    """A reward returned None: among several it is left out of the sum."""


class Reward(plugins.NamedFunction):
    """A function of a finished chain. Calling the reward calls the function; a chain uses `score`."""

    kind = "reward"

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        timeout: float | None = TIMEOUT,
        names: Mapping[str, Any] | None = None,
    ) -> None:
        """`names`: local names that string type hints may use. The other settings are those of `reward`."""
        if not callable(function) or isinstance(function, type | Reward):
            raise ConfigError(f"{function!r} cannot be made a reward: it takes a function, a partial or an object")
        is_routine = inspect.isroutine(function)
        super().__init__(function if is_routine else _to_function(function), name, names)
        self.timeout = timeout
        self.parameters = dict(inspect.signature(self.function).parameters)
        for parameter in self.parameters.values():
            if parameter.kind is parameter.POSITIONAL_ONLY:
                raise ConfigError(
                    f"reward {self.name!r}: {parameter.name!r} is passed by name; it cannot precede a `/`"
                )
        if foreign := next((name for name in self.parameters if name in _FOREIGN_PARAMETERS), ""):
            raise ConfigError(
                f"reward {self.name!r} has the signature of {_FOREIGN_PARAMETERS[foreign]}, with {foreign!r}. A reward "
                "here scores one chain, and its parameters are filled by name: write prediction for the final answer "
                "(solution_str), task for the prompt, trajectory for the whole chain, and the name of any column, such "
                f"as ground_truth; return one number. A column of this name is task.columns[{foreign!r}]"
            )
        validate(f"reward {self.name!r}: timeout", timeout, PositiveFloat | None, ", or None for no limit")
        if is_routine:  # a partial would replace its function under that name
            REWARDS.add(self)

    @functools.cached_property
    def hints(self) -> dict[str, Any]:
        """Every parameter with its type, as `type_hints` returns it."""
        return type_hints(self.function, self._names)

    @functools.cached_property
    def environments(self) -> dict[str, type[Environment]]:
        """Parameters with an environment class as type hint."""
        hints = self.hints.items()
        return {name: hint for name, hint in hints if inspect.isclass(hint) and issubclass(hint, Environment)}

    def check(self, task: Task, used: Iterable[type[Environment]] = ()) -> None:
        """Raise ConfigError for a parameter that this task cannot fill. `used`: the agent's environments."""
        for name, parameter in self.parameters.items():
            if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                continue
            if name in task.columns and name not in self.environments:
                self._check_column(name, task.columns[name], used)
            if parameter.default is not parameter.empty:
                continue
            if name not in OFFERED and name not in task.columns and self._env_class(name, task, used) is None:
                offered = sorted({*OFFERED, *task.columns, *(["env"] if used else [])})
                raise ConfigError(f"reward {self.name!r} asks for {name!r}; it may ask for {', '.join(offered)}")

    def _check_column(self, name: str, value: Any, used: Iterable[type[Environment]]) -> None:
        """Raise ConfigError where the column of a parameter's name cannot be what the parameter is meant to receive."""
        hint = self.hints[name]
        if name in _OFFERED_TYPES:
            if not _accepts(hint, _OFFERED_TYPES[name]):
                raise ConfigError(
                    f"reward {self.name!r}: {self.parameters[name]} receives the {_OFFERED_TYPES[name].__name__} of "
                    f"the chain, not the column {name!r}; take the parameter `task` and read task.columns[{name!r}]"
                )
        elif name == "env" and hint is Any and used:
            classes = " or ".join(env_class.__name__ for env_class in used)
            raise ConfigError(
                f"reward {self.name!r}: env may be the environment or the column 'env'; write env: {classes}, or a "
                f"type such as env: str for the column"
            )
        elif isinstance(value, str) and not _accepts(hint, str) and any(_accepts(hint, t) for t in (int, float, bool)):
            raise ConfigError(
                f"reward {self.name!r}: {self.parameters[name]} receives the text {value!r:.40} of the column "
                f"{name!r}; convert it in the reward ({name}: str), or store numbers: cells of a CSV file are text"
            )

    def takes(self, name: str) -> bool:
        """Whether a parameter has this name."""
        return name in self.parameters

    def shadowed_columns(self, task: Task) -> set[str]:
        """Columns of the task that a reader of the reward may expect in it, and that it does not receive by name."""
        shadowed = task.columns.keys() & _OFFERED_TYPES.keys()
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in self.parameters.values()):
            return shadowed
        return {name for name in shadowed & self.parameters.keys() if self.hints[name] in (Any, str)}

    def _env_class(self, name: str, task: Task, used: Iterable[type[Environment]]) -> type[Environment] | None:
        """The environment class of a parameter: its type hint, or for an untyped `env` the only one in use."""
        env_class = self.environments.get(name)
        if env_class is None and name == "env" and name not in task.columns and used:
            env_class = Environment
        return env_class and resolve_env_class(env_class, used, f"reward {self.name!r}")

    def env_parameters(self, task: Task, used: Iterable[type[Environment]]) -> dict[str, type[Environment]]:
        """The parameters that receive an environment, with its class, for a chain of this task."""
        if not self.environments and "env" not in self.parameters:
            return {}
        env_classes = {name: self._env_class(name, task, used) for name in self.parameters}
        return {name: env_class for name, env_class in env_classes.items() if env_class is not None}

    async def score(
        self, trajectory: Trajectory, context: Context, leases: Leases, used: Iterable[type[Environment]] = ()
    ) -> Score:
        """Call the reward and validate what it returns. Raises RewardFault and EnvironmentFault."""
        task = trajectory.task
        prediction = trajectory.prediction[-MAX_PREDICTION:]
        offered = {
            **task.columns,
            "prediction": prediction,
            "final_response": prediction,
            "trajectory": trajectory,
            "task": task,
            "context": context,
        }
        if "messages" in self.parameters:
            offered["messages"] = trajectory.messages
        arguments: dict[str, Any] = {}
        for name, parameter in self.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                unused_columns = task.columns.keys() - self.parameters.keys() - set(OFFERED)
                arguments.update({column: task.columns[column] for column in unused_columns})
            elif parameter.kind is parameter.VAR_POSITIONAL:
                continue
            elif name in offered and name not in self.environments:
                arguments[name] = offered[name]
        parameters = self.env_parameters(task, used)

        async def run(environments: Mapping[type[Environment], Environment]) -> Any:
            injected = {name: environments[env_class] for name, env_class in parameters.items()}
            return await call(self.function, **arguments, **injected)

        for env_class in parameters.values():
            await leases.get(env_class)  # waiting for an instance does not count against the reward's timeout
        limit = asyncio.timeout(self.timeout)
        try:
            scoring = leases.act(tuple(set(parameters.values())), run) if parameters else run({})
            returned = await run_within(limit, LoopTimer(scoring, f"reward {self.name!r}"))
            return to_score(returned, len(trajectory.turns), f"reward {self.name!r}")
        except (EnvironmentFault, RewardFault):
            raise
        except Exception as error:
            problem = f"took longer than {self.timeout:g} s" if limit.expired() else f"failed: {describe(error)}"
            raise RewardFault(f"reward {self.name!r} {problem}") from error


def to_score(returned: Any, turns: int, source: str) -> Score:
    """The score of what `source` returned: a number, one per turn, or a dict. Raises RewardFault."""
    original = returned

    def to_number(value: Any) -> float:
        try:
            number = math.nan if isinstance(value, str | bytes | bytearray) else float(value)
        except Exception:
            number = math.nan
        if not abs(number) <= MAX_REWARD:
            raise RewardFault(
                f"{source} returned {original!r:.80}; it may return a finite number up to {MAX_REWARD:g}, a list with "
                "one number per turn, or a dict with 'reward' and metrics"
            )
        return number

    metrics: dict[str, Any] = {}
    if isinstance(returned, Mapping):
        metrics = dict(returned)
        if "reward" not in metrics:
            has = ", ".join(map(repr, metrics)) or "nothing"
            raise RewardFault(f"{source} returned a dict without 'reward'; it has {has}")
        returned, metrics = metrics.pop("reward"), to_plain(metrics)
    if returned is None:
        abstention = Abstention(f"{source} returned None; only one of several rewards may abstain")
        abstention.metrics = metrics
        raise abstention
    if getattr(returned, "ndim", 0):  # an array of numpy or torch
        returned = returned.tolist()
    if isinstance(returned, Sequence) and not isinstance(returned, str | bytes):
        per_turn = tuple(to_number(value) for value in returned)
        if len(per_turn) != turns:
            raise RewardFault(f"{source} returned {len(per_turn)} numbers for a chain of {turns} turns")
        return Score(sum(per_turn), per_turn, metrics)
    return Score(to_number(returned), None, metrics)


def _to_function(value: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls a `functools.partial` or an object with `__call__`. Arguments of a partial stay bound."""
    inner: Any = value
    bound: dict[str, Any] = {}
    while isinstance(inner, functools.partial):
        bound = {**inner.keywords, **bound}
        inner = inner.func
    named = inner if hasattr(inner, "__qualname__") else type(inner)

    def function(*args: Any, **kwargs: Any) -> Any:
        return value(*args, **{name: argument for name, argument in kwargs.items() if name not in bound})

    function.__name__, function.__qualname__, function.__module__ = (
        named.__name__,
        named.__qualname__,
        named.__module__,
    )
    function.__doc__ = inspect.getdoc(inner)
    signature = inspect.signature(value)
    parameters = [parameter for name, parameter in signature.parameters.items() if name not in bound]
    function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    # Type hints in quotes are resolved in the module of the wrapped function.
    function.__wrapped__ = inner if inspect.isroutine(inner) else type(inner).__call__  # type: ignore[attr-defined]
    return function


@overload
def reward(function: Callable[..., Any], /) -> Reward: ...
@overload
def reward(*, name: str | None = None, timeout: float | None = TIMEOUT) -> Callable[[Callable[..., Any]], Reward]: ...
def reward(function: Callable[..., Any] | None = None, /, **settings: Any) -> Any:
    """Make a reward of a function, also async, a `functools.partial`, or an object with `__call__`.

    Args:
        function: The function, when the decorator is used bare.
        name: Name in metrics; None: the function's name.
        timeout: Maximum seconds per call; None: no limit.
    """
    frame = sys._getframe(1)

    def decorate(function: Callable[..., Any]) -> Reward:
        return Reward(function, names=caller_namespace(frame, function), **settings)

    return decorate if function is None else decorate(function)


REWARDS: plugins.Registry[Reward] = plugins.Registry("reward", plugins.REWARDS)
"""All rewards by name."""

RewardLike = Reward | Callable[..., Any] | str
RewardSpec = RewardLike | Iterable[RewardLike] | Mapping[RewardLike, float]


def find_reward(source: RewardLike) -> Reward:
    """The reward of a name, or made of a function. Raises ConfigError for something else."""
    if isinstance(source, str):
        return REWARDS.find(source)
    if isinstance(source, Reward):
        return source
    if not callable(source) or inspect.isclass(source):
        raise ConfigError(f"{source!r} is not a reward; pass a function, also with @reward, or a reward's name")
    return Reward(source)


class Scorer:
    """The rewards of one agent, each with its weight."""

    def __init__(self, spec: RewardSpec, environments: Iterable[type[Environment]] = ()) -> None:
        """`spec` is a reward, a function or a name, several of them, or a mapping from each to its weight."""
        if isinstance(spec, str) or callable(spec):
            spec = [spec]
        self.rewards: list[tuple[Reward, float]] = []
        for reward_like, weight in (
            spec.items() if isinstance(spec, Mapping) else [(reward_like, 1.0) for reward_like in spec]
        ):
            resolved = find_reward(reward_like)
            weight = validate(f"the weight of reward {reward_like!r}", weight, FiniteFloat)
            self.rewards.append((resolved, weight))
        names = [reward.name for reward, _ in self.rewards]
        if not names:
            raise ConfigError("an empty list of rewards; give one, or reward=None")
        if len(set(names)) < len(names):
            raise ConfigError(f"two rewards have the same name among {', '.join(names)}; give one another name=")
        self._used = tuple(dict.fromkeys(environments))
        self._reported_columns: set[str] = set()
        """Shadowed columns that were reported."""

    def check(self, task: Task) -> None:
        """Raise ConfigError if a reward has a parameter that this task cannot fill.

        The first time that columns are shadowed by what rewards receive under the same names, they are logged.
        """
        shadowed: set[str] = set()
        for reward, _ in self.rewards:
            reward.check(task, self._used)
            shadowed |= reward.shadowed_columns(task)
        if shadowed := shadowed - self._reported_columns:
            self._reported_columns |= shadowed
            columns = [f"task.columns[{name!r}]" for name in sorted(shadowed)]
            _LOG.warning(
                "rewards do not receive the columns %s by name, since these names mean the chain's own objects; the "
                "values are %s: in a reward with the parameter `task`, in an environment in `reset(task)`",
                ", ".join(map(repr, sorted(shadowed))),
                ", ".join(columns),
            )

    def takes(self, name: str) -> bool:
        """Whether a reward has a parameter of this name."""
        return any(reward.takes(name) for reward, _ in self.rewards)

    def environments(self, task: Task) -> Iterable[type[Environment]]:
        """The environment classes that the rewards use for a chain of this task."""
        return (
            env_class for reward, _ in self.rewards for env_class in reward.env_parameters(task, self._used).values()
        )

    async def score(self, trajectory: Trajectory, context: Context, leases: Leases) -> Score:
        """The weighted sum of all rewards. With several, the value of each is a metric under its name.

        Rewards run concurrently; those that use an environment one after another, since they share the instance. One
        of several that returns None abstains. The fault of one that fails carries the metrics of the others.
        """
        lock = asyncio.Lock()

        async def run(reward: Reward) -> Score:
            shares = bool(reward.env_parameters(trajectory.task, self._used))
            async with lock if shares else contextlib.nullcontext():
                return await reward.score(trajectory, context, leases, self._used)

        outcomes = await asyncio.gather(*(run(reward) for reward, _ in self.rewards), return_exceptions=True)
        scores: list[tuple[Reward, float, Score]] = []
        faults: list[RewardFault] = []
        metrics: dict[str, Any] = {}
        for (reward, weight), outcome in zip(self.rewards, outcomes, strict=True):
            if isinstance(outcome, Score):
                scores.append((reward, weight, outcome))
            elif not isinstance(outcome, RewardFault):
                raise outcome
            elif isinstance(outcome, Abstention):
                metrics.update({f"{reward.name}/{name}": value for name, value in outcome.metrics.items()})
            else:
                faults.append(outcome)
        if not scores and not faults:
            faults = [outcome for outcome in outcomes if isinstance(outcome, RewardFault)]
        if len(self.rewards) == 1 and scores:
            _, weight, score = scores[0]
            if weight == 1.0:
                return score
            scaled = None if score.per_turn is None else tuple(weight * value for value in score.per_turn)
            return _build_score(weight * score.total, scaled, score.metrics, {})
        components: dict[str, ScoreComponent] = {}
        total = 0.0
        per_turn = [0.0] * len(trajectory.turns)
        for reward, weight, score in scores:
            metrics[reward.name] = score.total
            components[reward.name] = ScoreComponent(weight, score.total)
            metrics.update({f"{reward.name}/{name}": value for name, value in score.metrics.items()})
            total += weight * score.total
            for turn, value in enumerate(score.per_turn or ()):
                per_turn[turn] += weight * value
            if score.per_turn is None and per_turn:
                per_turn[-1] += weight * score.total  # a reward of the whole chain counts at its last turn
        if faults:
            faults[0].metrics = {**faults[0].metrics, **metrics}
            raise faults[0]
        has_turns = any(score.per_turn is not None for _, _, score in scores)
        return _build_score(total, tuple(per_turn) if has_turns else None, metrics, components)


def _build_score(
    total: float,
    per_turn: tuple[float, ...] | None,
    metrics: Mapping[str, Any],
    components: Mapping[str, ScoreComponent],
) -> Score:
    """The score of weighted rewards, whose sum may be too large."""
    try:
        return Score(total, per_turn, metrics, components)
    except RecordError as error:
        raise RewardFault(f"the weighted sum of the rewards: {error}") from error
