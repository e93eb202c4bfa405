"""The environment that is examined, its tasks, and what an expert does in them."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from random import Random

from agentfly.agents import HFAgent
from agentfly.conformance.probing import probes
from agentfly.conformance.report import NotApplicable
from agentfly.conformance.visit import Told, Trace, Visitor, visit
from agentfly.environment import Environment, Scope, draws_tasks
from agentfly.errors import describe
from agentfly.resources import ResourceManager
from agentfly.scoring import REWARDS, Reward
from agentfly.tooling import Tool, Toolbox
from agentfly.training.demonstrations import Demonstrations
from agentfly.types import Task, ToolCall

SPLITS = ("train", "validation", "test")
NO_TASK = Task((), {}, "no task")
MOST_STEPS = 60
"""Calls of an expert that are played again; a whole chain of it may take more."""


@dataclass
class Subject:
    """An environment under examination."""

    kind: type[Environment]
    given: Sequence[Task] = ()
    """Tasks that the caller gave; else the environment draws its own, and where it has none there is an empty one."""
    seed: int = 0
    instances: int = 4
    seconds: float = 120.0
    """CPU time that each property may take."""
    started: bool = False
    """Whether an instance could be had."""
    deterministic: bool = True
    """Whether two runs in fresh instances were equal; where not, nothing can be compared."""
    isolated: bool = True
    """Whether a reset instance was as a fresh one; where not, only fresh ones can be compared."""
    given_up: bool = False
    """Whether nobody waits for the findings any more."""
    demonstrated: dict[str, Demonstrations] = field(default_factory=dict)
    """What the expert did, by split."""

    @functools.cached_property
    def toolbox(self) -> Toolbox:
        """Its tools; none where only rewards and other tools use it."""
        has_tools = any(isinstance(inspect.getattr_static(self.kind, name), Tool) for name in dir(self.kind))
        return Toolbox([self.kind] if has_tools else [])

    @property
    def has_expert(self) -> bool:
        return self.kind.expert is not Environment.expert

    @functools.cached_property
    def reward(self) -> Reward | None:
        """The reward that is meant for its tasks, of its own module if that has one so named; None: it names none."""
        import agentfly.rewards  # noqa: F401  (its names are then known)

        if not (name := self.kind.scored_by):
            return None
        own = getattr(sys.modules.get(self.kind.__module__), name, None)
        return own if isinstance(own, Reward) else REWARDS.find(name)

    @functools.cached_property
    def samples(self) -> dict[str, list[Task]]:
        """A few tasks of every split."""
        if self.given:
            return {"given": list(self.given)}
        if not draws_tasks(self.kind):
            return {"empty": [NO_TASK]}
        count = max(self.instances, 4)
        return {split: [Task.of(row) for row in self.kind.draw_tasks(split, count, seed=self.seed)] for split in SPLITS}

    def tasks(self, count: int) -> list[Task]:
        """So many tasks, the same ones again where there are fewer."""
        there = next(iter(self.samples.values()))
        return [there[number % len(there)] for number in range(count)]

    def manager(self, instances: int = 1) -> ResourceManager:
        """A manager of its own, with nothing started yet."""
        return ResourceManager({self.kind: replace(self.kind.pool, min_warm=0, max_instances=instances)})

    def agent(self) -> HFAgent:
        """An agent that could act in it, and gives up at once."""
        tools, spoken = list(self.toolbox), {"script": "I do not know."}
        return HFAgent(tools=tools, reward=self.reward, template="chatml", backend="scripted", backend_config=spoken)

    def refuse_without_tools(self) -> None:
        """Leave alone what is seen by acting."""
        if not len(self.toolbox):
            raise NotApplicable("it has no tools")

    def refuse_shared(self) -> None:
        """Leave alone what cannot be had of an instance that everybody has."""
        if self.kind.pool.scope is Scope.GLOBAL:
            raise NotApplicable("one instance is everybody's, and is never reset")

    def refuse_random(self) -> None:
        """Leave alone what can only be seen by comparing."""
        if not self.kind.deterministic:
            raise NotApplicable("its simulator varies between runs (deterministic = False), so nothing can be compared")
        if not self.deterministic:
            raise NotApplicable("two runs differ even in fresh instances, so nothing can be compared")

    def visit(self, manager: ResourceManager, task: Task) -> AbstractAsyncContextManager[Visitor]:
        """Be lent an instance that is reset for the task."""
        return visit(self.kind, self.toolbox, manager, task)

    async def trace(self, task: Task) -> Trace:
        """What a fresh instance tells: of an expert's calls; where it has none, of calls that fit the tools."""
        calls: list[ToolCall] = []
        told: list[Told] = []
        manager, made_up, follows = self.manager(), iter(self.probes(task)), self.has_expert
        try:
            async with self.visit(manager, task) as visitor:
                while len(calls) < MOST_STEPS and not (told and told[-1].ends):
                    call = await self._next(visitor) if follows else None
                    follows = follows and call is not None
                    call = next(made_up, None) if call is None else call
                    if not isinstance(call, ToolCall):
                        break
                    calls.append(call)
                    told.append(await visitor.act(call))
                return Trace(tuple(calls), tuple(told), visitor.state())
        finally:
            await manager.close()

    async def _next(self, visitor: Visitor) -> ToolCall | str | None:
        try:
            return await visitor.expert()
        except Exception:  # whether the expert is any good is a property of its own
            return None

    def probes(self, task: Task) -> list[ToolCall]:
        """Calls of every tool that fit its schema; those that may end the chain come last."""
        return probes(self.toolbox, task, Random(self.seed))


def told_of(error: BaseException) -> str:
    """An error in one line that fits a report."""
    return f"{' '.join(describe(error).split()):.300}"
