"""The contract of a stateful world, and how its instances are kept.

An environment is a plain class. Its `@tool` methods are its actions. The resource manager makes the instances: it calls
`start` once, `reset` before each chain, `check` on one that has been idle, and `close` at the end; nobody else does.
A world that knows tasks of its own draws them in `draw_tasks`; one that knows what is best to do says so in `expert`,
and demonstrations are made of it.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from agentfly.errors import ConfigError
from agentfly.types import Task, ToolCall


class Scope(enum.Enum):
    """Who shares an instance."""

    CHAIN = "chain"
    """Nobody: every chain has its own, reset for its task."""
    GROUP = "group"
    """The chains of one task in one run: it is reset once, for that task."""
    GLOBAL = "global"
    """Every chain: it is started once, and never reset."""


class Recycle(enum.Enum):
    """What becomes of a healthy instance when a chain gives it back."""

    RESET = "reset"
    """The next chain gets it, reset."""
    REPLACE = "replace"
    """It is closed; the next chain gets a fresh one."""


@dataclass(frozen=True, slots=True)
class Pool:
    """How the instances of one environment are kept: `pool = Pool(max_instances=8)` in the class body."""

    min_warm: int = 0
    """Instances kept started ahead of need, from the first run on."""
    max_instances: int | None = None
    """Most instances at once, in whatever state; None: what the place finds bearable, in this process no limit."""
    start_timeout: float = 300.0
    """Seconds that `start` may take."""
    reset_timeout: float = 60.0
    """Seconds that `reset`, `check` and `close` may each take."""
    wait_timeout: float = 600.0
    """Seconds that a chain waits for an instance."""
    idle_seconds: float = 60.0
    """Seconds after which an idle instance beyond `min_warm` is closed."""
    max_uses: int | None = None
    """Chains that one instance serves before it is replaced; None: no limit."""
    recycle: Recycle = Recycle.RESET
    scope: Scope = Scope.CHAIN
    concurrent: bool = False
    """Whether chains that share an instance may act in it at once; else their actions take turns."""
    memory: int | None = None
    """Bytes that an instance is counted at where the manager has a memory budget; None: it is not counted."""
    place: Place | str = "here"
    """Where instances live: `here` (in this process), `process`, `sandbox`, or a Place such as `Container(image=…)`."""

    def __post_init__(self) -> None:
        for name, kind in (("recycle", Recycle), ("scope", Scope)):
            try:
                object.__setattr__(self, name, kind(getattr(self, name)))
            except ValueError:
                there = ", ".join(each.value for each in kind)
                raise ConfigError(f"a pool's {name} is one of {there}, not {getattr(self, name)!r}") from None
        for field, least in (("min_warm", 0), ("max_instances", 1), ("max_uses", 1), ("memory", 1)):
            value = getattr(self, field)
            if value is None and field != "min_warm":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"a pool's {field} must be a whole number of at least {least}, not {value!r}")
        for field in ("start_timeout", "reset_timeout", "wait_timeout", "idle_seconds"):
            value = getattr(self, field)
            if not isinstance(value, int | float) or isinstance(value, bool) or not value >= 0:
                raise ConfigError(f"a pool's {field} must be a number of seconds, not {value!r}")
        if self.max_instances is not None and self.min_warm > self.max_instances:
            raise ConfigError(f"a pool cannot keep {self.min_warm} warm with max_instances={self.max_instances}")
        if self.concurrent and self.scope is Scope.CHAIN:
            raise ConfigError("concurrent=True is for an instance that is shared; write scope='group' or 'global' too")


class Environment:
    """A world that one chain at a time acts in. The constructor takes no arguments and does nothing slow."""

    pool: ClassVar[Pool] = Pool()
    scored_by: ClassVar[str] = ""
    """The name of the reward that is meant for its tasks; empty: none is."""
    deterministic: ClassVar[bool] = True
    """Whether a task and calls always give the same observations. False: its simulator varies between runs, by chance
    that no seed reaches; `agentfly env check` then compares no runs."""

    @classmethod
    def draw_tasks(cls, split: str = "train", count: int = 100, *, seed: int = 0) -> list[dict[str, Any]]:
        """So many tasks of a split (train, validation or test): rows, the same for the same arguments.

        No task is in two splits, whatever the seeds.
        """
        raise ConfigError(f"{cls.__name__} draws no tasks of its own; take them from a file")

    async def start(self) -> None:
        """Make the world ready. Slow work goes here; called once for each instance."""

    async def reset(self, task: Task) -> None:
        """Set the world up for a task. Called before every chain, on a started instance."""

    async def check(self) -> None:
        """Raise if the world can no longer be used. Asked of an instance that has been idle, before it is lent."""

    def expert(self) -> ToolCall | str | Awaitable[ToolCall | str]:
        """What an expert does next in the present state: a call of a tool, or the final answer. May be async.

        It only says so: the call is carried out as a model's is, and then the expert is asked again.
        """
        raise ConfigError(
            f"{type(self).__name__} has no expert; give it a method `expert`, or take demonstrations of a file"
        )

    async def close(self) -> None:
        """Release everything. Called once, also after a failed start or reset; again only if it was cut short."""


class Housed:
    """One instance, and what it lives in. As it stands, an instance in this process."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment

    def death(self) -> str | None:
        """Why it can no longer be used, where that can be told at once; None: nothing speaks against it."""
        return None

    def memory(self) -> int | None:
        """Bytes it holds now; None where nobody can tell it from the rest of this process."""
        return None

    async def rest(self) -> None:
        """Use as little as possible until `wake`: it is idle."""

    async def wake(self) -> None:
        """Be ready again, after `rest`."""

    async def end(self) -> None:
        """Be rid of whatever is left, after `close` or instead of it. Called also where `close` failed or hung."""


class Place(Protocol):
    """Somewhere that instances live."""

    name: str
    """In one word, for figures and messages."""
    max_instances: int | None
    """Most instances of one environment that are bearable where the user names no limit; None: no limit."""

    async def house(self, kind: type[Environment]) -> Housed:
        """Make an instance, not yet started. Raises what the user can mend as ConfigError, the rest as it comes."""
        ...


def draws_tasks(kind: type[Environment]) -> bool:
    """Whether it has tasks of its own."""
    return kind.draw_tasks.__func__ is not Environment.draw_tasks.__func__  # type: ignore[attr-defined]


def refuse_unmakable(kind: type[Environment]) -> None:
    """Find out before the first chain that nobody could make an instance."""
    needed = [
        p.name
        for p in inspect.signature(kind).parameters.values()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if needed:
        raise ConfigError(
            f"{kind.__name__}() needs {', '.join(needed)}, which nobody could give it; "
            "give them defaults, or set a chain's world up in reset(task)"
        )


def meant(kind: type[Environment], used: Iterable[type[Environment]], asker: str) -> type[Environment]:
    """The type that `asker` means by `kind`: the subclass of it that is in use, or `kind` itself where none is."""
    fitting = {each for each in used if issubclass(each, kind)}
    closest = [each for each in fitting if not any(other is not each and issubclass(other, each) for other in fitting)]
    if len(closest) > 1:
        names = ", ".join(sorted(each.__name__ for each in closest))
        raise ConfigError(f"{asker} asks for {kind.__name__}, which may be any of {names}; ask for one of these")
    if not closest and kind is Environment:
        raise ConfigError(f"{asker} asks for an Environment, but no tool acts in one; ask for the class you mean")
    return closest[0] if closest else kind
