"""The contract of a stateful environment, and the settings of its instance pool.

Standard library only: worker processes, sandboxes and containers import this module.

An environment is a plain class; its `@tool` methods are its actions. Only the resource manager creates instances: it
calls `start` once, `reset` before each chain, `check` on an instance that was idle, and `close` at the end. An
environment may generate its own tasks (`draw_tasks`), provide an expert policy (`expert`) for demonstrations, and copy
its state in the middle of a chain (`snapshot`, `restore`) for tree sampling.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from agentfly.errors import ConfigError
from agentfly.types import Task, ToolCall, number, validate_numbers


class Scope(enum.Enum):
    """Which chains share an instance."""

    CHAIN = "chain"
    """None: every chain has its own instance, reset for its task."""
    GROUP = "group"
    """The chains of one task in one run; the instance is reset once, for that task."""
    GLOBAL = "global"
    """All chains; the instance is started once and never reset."""


class Recycle(enum.Enum):
    """What happens to a healthy instance when a chain releases it."""

    RESET = "reset"
    """It is reset for the next chain."""
    REPLACE = "replace"
    """It is closed; the next chain gets a new instance."""


class InstanceHandle:
    """One instance and whatever it runs in. This base class is an instance in the current process."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment

    def exit_reason(self) -> str | None:
        """Why the instance can no longer be used, if that is known without waiting; else None."""
        return None

    def memory(self) -> int | None:
        """Bytes the instance uses now; None if it cannot be measured apart from the current process."""
        return None

    async def pause(self) -> None:
        """Use as few resources as possible until `resume`: the instance is idle."""

    async def resume(self) -> None:
        """Undo `pause`."""

    async def terminate(self) -> None:
        """Free everything that is left. Called after `close`, also if `close` failed or timed out."""


class Runtime(Protocol):
    """Where instances run."""

    name: str
    """One word, for metrics and messages."""
    max_instances: int | None
    """Default limit for the instances of one environment; None: no limit."""

    async def create(self, env_class: type[Environment], /) -> InstanceHandle:
        """Create an instance without starting it. Raises ConfigError for what the user can fix."""


@dataclass(frozen=True, slots=True)
class Pool:
    """Settings of an environment's instance pool: `pool = Pool(max_instances=8)` in the class body."""

    min_warm: int = number(0, whole=True, ge=0)
    """Instances kept started, from the first run on."""
    max_instances: int | None = number(None, whole=True, ge=1)
    """Maximum number of instances, in any state. None: the runtime's default limit (`in_process` has none)."""
    start_timeout: float = number(300.0, ge=0)
    """Seconds for `start`."""
    reset_timeout: float = number(60.0, ge=0)
    """Seconds each for `reset`, `check` and `close`."""
    wait_timeout: float = number(600.0, ge=0)
    """Seconds that a chain waits for an instance."""
    idle_seconds: float = number(60.0, ge=0)
    """Seconds after which an idle instance beyond `min_warm` is closed."""
    max_uses: int | None = number(None, whole=True, ge=1)
    """Chains that one instance serves before it is replaced; None: no limit."""
    recycle: Recycle = Recycle.RESET
    """Whether the next chain gets the same instance after a `reset`, or a new one (`replace`)."""
    scope: Scope = Scope.CHAIN
    """Which chains share an instance: none (`chain`), those of one task (`group`), or all (`global`)."""
    concurrent: bool = False
    """Whether chains that share an instance may act in it concurrently; otherwise their actions are serialized."""
    memory: int | None = number(None, whole=True, ge=1)
    """Bytes per instance that count against the manager's memory budget; None: not counted."""
    runtime: Runtime | str = "in_process"
    """Where instances run: `in_process`, `process`, `sandbox`, or a Runtime such as `Container(image=…)`."""

    def __post_init__(self) -> None:
        for name, enum_class in (("recycle", Recycle), ("scope", Scope)):
            try:
                object.__setattr__(self, name, enum_class(getattr(self, name)))
            except ValueError:
                options = " or ".join(repr(member.value) for member in enum_class)
                raise ConfigError(f"a pool's {name} must be {options}, not {getattr(self, name)!r}") from None
        validate_numbers(self, "a pool's ", optional=("max_instances", "max_uses", "memory"), infinite=True)
        if self.max_instances is not None and self.min_warm > self.max_instances:
            raise ConfigError(f"a pool cannot keep {self.min_warm} warm with max_instances={self.max_instances}")
        if self.concurrent and self.scope is Scope.CHAIN:
            raise ConfigError("concurrent=True requires a shared instance; write scope='group' or 'global' too")


class Environment:
    """A stateful environment that one chain at a time acts in. The constructor takes no arguments and is fast."""

    pool: ClassVar[Pool] = Pool()
    scored_by: ClassVar[str] = ""
    """Name of the reward for the environment's tasks; empty: none."""
    deterministic: ClassVar[bool] = True
    """Whether the same task and calls always give the same observations. False: the simulator has randomness that no
    seed controls, and `agentfly env check` does not compare runs."""

    @classmethod
    def draw_tasks(cls, split: str = "train", count: int = 100, *, seed: int = 0) -> list[dict[str, Any]]:
        """Return `count` rows of a split (train, validation or test), always the same for the same arguments.

        No task may be in two splits, whatever the seeds.
        """
        raise ConfigError(f"{cls.__name__} draws no tasks of its own; take them from a file")

    @classmethod
    def load_tools(cls) -> None:
        """Define `@tool` methods that are only known at run time, such as those of a server. Called before the class's
        tools are listed, as often as they are."""

    async def start(self) -> None:
        """Prepare the instance. Slow work goes here; called once per instance."""

    async def reset(self, task: Task) -> None:
        """Set up the instance for a task. Called before every chain, on a started instance."""

    async def check(self) -> None:
        """Raise if the instance can no longer be used. Called on an idle instance before it is leased."""

    async def snapshot(self) -> Any:
        """Return the state since `reset` as plain data that shares nothing with the instance, for `restore`."""
        raise ConfigError(f"{type(self).__name__} cannot be branched: give it the methods `snapshot` and `restore`")

    async def restore(self, state: Any) -> None:
        """Continue from a snapshot. Called after `reset` for the same task, usually on another instance.

        The same state may be restored several times, so it must not be changed.
        """
        raise ConfigError(f"{type(self).__name__} cannot be branched: give it the methods `snapshot` and `restore`")

    def expert(self) -> ToolCall | str | Awaitable[ToolCall | str]:
        """Return the expert's next action in the current state: a tool call, or the final answer. May be async.

        It does not act: the call is run like a model's call, and then the expert is asked for the next one.
        """
        raise ConfigError(
            f"{type(self).__name__} has no expert; give it a method `expert`, or read demonstrations from a file"
        )

    async def close(self) -> None:
        """Release everything. Called once, also after a failed start or reset; again only if it was interrupted."""


def has_tasks(env_class: type[Environment]) -> bool:
    """Whether the environment generates its own tasks."""
    # A subclass without tasks may say `draw_tasks = Environment.draw_tasks`; a staticmethod has no __func__.
    inherited = Environment.draw_tasks.__func__  # type: ignore[attr-defined]
    return getattr(env_class.draw_tasks, "__func__", None) is not inherited


def can_branch(env_class: type[Environment]) -> bool:
    """Whether the environment can be copied in the middle of a chain: `snapshot` and `restore`."""
    return all(getattr(env_class, name) is not getattr(Environment, name) for name in ("snapshot", "restore"))


def validate_constructor(env_class: type[Environment]) -> None:
    """Raise ConfigError if the constructor requires arguments: the manager passes none."""
    required = [
        p.name
        for p in inspect.signature(env_class).parameters.values()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if required:
        raise ConfigError(
            f"{env_class.__name__}() requires {', '.join(required)}, but instances are created without arguments; "
            "give them defaults, or set up the instance in reset(task)"
        )


def resolve_env_class(env_class: type[Environment], used: Iterable[type[Environment]], user: str) -> type[Environment]:
    """Return the subclass of `env_class` that is in use, or `env_class` itself if none is.

    used: the environments of an agent. user: the tool or reward that asks for `env_class`, for error messages.
    """
    matching = {used_class for used_class in used if issubclass(used_class, env_class)}
    closest = [e for e in matching if not any(other is not e and issubclass(other, e) for other in matching)]
    if len(closest) > 1:
        names = ", ".join(sorted(candidate.__name__ for candidate in closest))
        raise ConfigError(f"{user} asks for {env_class.__name__}, which may be any of {names}; ask for one of these")
    if not closest and env_class is Environment:
        raise ConfigError(f"{user} asks for an Environment, but no tool acts in one; ask for a specific class")
    return closest[0] if closest else env_class
