"""The environment under test (its tools, tasks, reward and agent), traces of calls in leased instances, and results."""

from __future__ import annotations

import enum
import functools
import inspect
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from random import Random

from agentfly.agents import HFAgent
from agentfly.backends.scripted import ScriptedBackend
from agentfly.conformance.session import CallAnswer, CheckSession, Trace, valid_arguments
from agentfly.environment import Environment, Scope, has_tasks
from agentfly.errors import AgentFlyError, describe
from agentfly.resources import ResourceManager
from agentfly.scoring import REWARDS, Reward
from agentfly.sft.demonstrations import Demonstrations
from agentfly.tooling import Tool, Toolbox
from agentfly.types import Task, ToolCall

SPLITS = ("train", "validation", "test")
NO_TASK = Task((), {}, "no task")
ROUNDS = 2
"""Valid calls per tool."""
MAX_CALLS = 60
"""Length of a trace. An expert's whole chain may be longer."""


class PropertyStatus(enum.Enum):
    """Outcome of checking one property."""

    PASS = "pass"
    FAIL = "FAIL"
    NOT_APPLICABLE = "n/a"


class PropertyFailed(Exception):
    """The property does not hold; the message says what was observed."""


class NotApplicable(Exception):
    """The property does not apply to this environment; the message says why."""


@dataclass(frozen=True, slots=True)
class PropertyResult:
    """Outcome of one property, with what was observed."""

    name: str
    status: PropertyStatus
    detail: str

    def __str__(self) -> str:
        return f"{self.status.value:4}  {self.name:<20}  {self.detail}"


@dataclass(frozen=True, slots=True)
class ConformanceReport:
    """Results of all properties of one environment."""

    environment: str
    results: tuple[PropertyResult, ...]

    @property
    def ok(self) -> bool:
        """Whether no property failed."""
        return not self.failures

    @property
    def failures(self) -> dict[str, str]:
        """The failed properties, with what was observed."""
        return {result.name: result.detail for result in self.results if result.status is PropertyStatus.FAIL}

    def __str__(self) -> str:
        return "\n".join([self.environment, *map(str, self.results)])


@dataclass
class Subject:
    """An environment class under test, and what the properties found out about it so far."""

    env_class: type[Environment]
    caller_tasks: Sequence[Task] = ()
    """The caller's tasks; if empty, the environment draws its own, and without `draw_tasks` there is one empty task."""
    seed: int = 0
    instances: int = 4
    """Instances used concurrently."""
    seconds: float = 120.0
    """CPU time limit of each property."""
    started: bool = False
    """Whether an instance could be started."""
    deterministic: bool = True
    """Whether two runs in fresh instances were equal; if not, nothing can be compared."""
    isolated: bool = True
    """Whether a reset instance behaved like a fresh one; if not, only fresh ones can be compared."""
    abandoned: bool = False
    """Whether the caller no longer waits for results."""
    demonstrations: dict[str, Demonstrations] = field(default_factory=dict)
    """The expert's chains by split."""

    @functools.cached_property
    def toolbox(self) -> Toolbox:
        """The environment's tools; empty if only rewards and other tools use it."""
        self.env_class.load_tools()
        has_tools = any(isinstance(inspect.getattr_static(self.env_class, name), Tool) for name in dir(self.env_class))
        return Toolbox([self.env_class] if has_tools else [])

    @property
    def has_expert(self) -> bool:
        return self.env_class.expert is not Environment.expert

    @functools.cached_property
    def reward(self) -> Reward | None:
        """The reward that `scored_by` names, first in the environment's module, then in the registry; None if unset."""
        import agentfly.rewards  # noqa: F401  (registers the prebuilt rewards)

        if not (name := self.env_class.scored_by):
            return None
        module_value = getattr(sys.modules.get(self.env_class.__module__), name, None)
        return module_value if isinstance(module_value, Reward) else REWARDS.find(name)

    @functools.cached_property
    def samples(self) -> dict[str, list[Task]]:
        """A few tasks of every split."""
        if self.caller_tasks:
            return {"given": list(self.caller_tasks)}
        if not has_tasks(self.env_class):
            return {"empty": [NO_TASK]}
        count = max(self.instances, 4)
        draw_tasks = self.env_class.draw_tasks
        return {split: [Task.of(row) for row in draw_tasks(split, count, seed=self.seed)] for split in SPLITS}

    def tasks(self, count: int) -> list[Task]:
        """Return `count` tasks, repeated if there are fewer."""
        tasks = next(iter(self.samples.values()))
        return [tasks[number % len(tasks)] for number in range(count)]

    @asynccontextmanager
    async def manager(self, instances: int = 1) -> AsyncIterator[ResourceManager]:
        """A manager for this environment, closed at the end; it starts no instance yet."""
        pool = replace(self.env_class.pool, min_warm=0, max_instances=instances)
        manager = ResourceManager({self.env_class: pool})
        try:
            yield manager
        finally:
            await manager.close()

    @asynccontextmanager
    async def agent(self) -> AsyncIterator[HFAgent]:
        """An agent with the environment's tools and reward, whose model makes no call. AgentFly's errors fail the
        property."""
        backend = ScriptedBackend("I do not know.")
        agent = HFAgent(tools=list(self.toolbox), reward=self.reward, template="chatml", backend=backend)
        try:
            yield agent
        except AgentFlyError as error:
            raise PropertyFailed(format_error(error)) from None
        finally:
            await agent.close()

    def require_tools(self) -> None:
        """Raise NotApplicable if the environment has no tools."""
        if not len(self.toolbox):
            raise NotApplicable("it has no tools")

    def require_reset(self) -> None:
        """Raise NotApplicable if one instance is shared by all chains."""
        if self.env_class.pool.scope is Scope.GLOBAL:
            raise NotApplicable("all chains share one instance, which is never reset")

    def require_determinism(self) -> None:
        """Raise NotApplicable if traces cannot be compared."""
        self.require_tools()
        self.require_reset()
        if not self.env_class.deterministic:
            raise NotApplicable("its simulator varies between runs (deterministic = False), so nothing can be compared")
        if not self.deterministic:
            raise NotApplicable("two runs differ even in fresh instances, so nothing can be compared")

    @asynccontextmanager
    async def session(self, manager: ResourceManager, task: Task) -> AsyncIterator[CheckSession]:
        """Lease an instance that is reset for the task."""
        group = manager.group()
        try:
            async with manager.leases(task, [self.env_class], group=group, chain="env check") as leases:
                yield CheckSession(self.toolbox, task, leases, await leases.get(self.env_class))
        finally:
            group.close()

    def valid_calls(self, task: Task) -> list[ToolCall]:
        """Calls of every tool that match its schema; those that end the chain come last, and once."""
        random = Random(self.seed)
        continuing = [tool for tool in self.toolbox if not tool.ends_chain]
        ending = [tool for tool in self.toolbox if tool.ends_chain]
        return [ToolCall(tool.name, valid_arguments(tool, task, random)) for tool in (*continuing * ROUNDS, *ending)]

    async def trace(self, task: Task) -> Trace:
        """Record the expert's calls in a fresh instance; generated calls where there is no expert or it stops."""
        calls: list[ToolCall] = []
        answers: list[CallAnswer] = []
        generated = iter(self.valid_calls(task))
        follow_expert = self.has_expert
        async with self.manager() as manager, self.session(manager, task) as session:
            while len(calls) < MAX_CALLS and not (answers and answers[-1].ends_chain):
                call: ToolCall | str | None = None
                if follow_expert:
                    try:
                        call = await session.expert()
                    except Exception:  # the property "expert solves" reports it
                        follow_expert = False
                if call is None:
                    follow_expert = False
                    call = next(generated, None)
                if not isinstance(call, ToolCall):
                    break
                calls.append(call)
                answers.append(await session.act(call))
            return Trace(tuple(calls), tuple(answers), session.state())

    async def replay(self, manager: ResourceManager, task: Task, calls: Sequence[ToolCall]) -> Trace:
        """Make the calls in an instance of the manager."""
        async with self.session(manager, task) as session:
            return await session.replay(calls)


def format_error(error: BaseException) -> str:
    """Format an error as one line of at most 300 characters."""
    return f"{' '.join(describe(error).split()):.300}"
