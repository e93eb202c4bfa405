"""Properties of the class: that anybody can make an instance, start it, and read what its tools do."""

from __future__ import annotations

import time
from typing import Any

from agentfly.conformance.clock import Stopwatch
from agentfly.conformance.report import Broken
from agentfly.conformance.subject import NO_TASK, Subject, told_of
from agentfly.environment import Scope, refuse_unmakable
from agentfly.errors import ConfigError, DataError, EnvironmentFault
from agentfly.resources.instance import Instance
from agentfly.resources.manager import place_of

QUICK = 1.0
"""Seconds of CPU time within which a constructor returns, once out of three times."""


async def constructor(subject: Subject) -> str:
    """The constructor takes nothing, and does nothing slow."""
    try:
        refuse_unmakable(subject.kind)
    except ConfigError as error:
        raise Broken(str(error)) from None
    for _ in range(3):
        watch, begun = Stopwatch(), time.perf_counter()
        subject.kind()
        took = time.perf_counter() - begun
        if not watch.exceeds(QUICK):
            return f"takes nothing, and {1000 * took:.1f} ms"
    raise Broken(f"it takes {took:.1f} s; slow work goes into start")


async def tools_documented(subject: Subject) -> str:
    """Every tool, and every argument of it, says what it is for."""
    subject.refuse_without_tools()
    for tool in subject.toolbox:
        function = tool.schema["function"]
        if not function["description"].strip():
            raise Broken(f"{tool.name} has no description; write a docstring")
        for name, spec in function["parameters"]["properties"].items():
            if not str(spec.get("description") or "").strip():
                raise Broken(f"{tool.name}: nothing is said of {name!r}; write it under Args: in the docstring")
            if not _typed(spec):
                raise Broken(f"{tool.name}: {name!r} may be anything; give it a type")
    return f"{len(subject.toolbox)} described, with all their arguments"


def _typed(spec: dict[str, Any]) -> bool:
    return any(key in spec for key in ("type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref"))


async def starts(subject: Subject) -> str:
    """An instance starts, is reset for a task, is well, and closes."""
    kind, pool = subject.kind, subject.kind.pool
    (task,) = subject.tasks(1)
    instance = Instance(kind, await place_of(pool.place).house(kind))
    try:
        await instance.step("start", pool.start_timeout)
        if pool.scope is not Scope.GLOBAL:
            await instance.step("reset", pool.reset_timeout, task)
        await instance.step("check", pool.reset_timeout)
    except EnvironmentFault as fault:
        if isinstance(fault.__cause__, ConfigError) and not isinstance(fault.__cause__, DataError):
            raise fault.__cause__ from None
        empty = task is NO_TASK and ".reset failed" in str(fault)
        hint = "; it was reset for an empty task, and --tasks FILE gives it real ones" if empty else ""
        raise Broken(f"{told_of(fault)}{hint}") from None
    finally:
        try:
            await instance.step("close", pool.reset_timeout)
        finally:
            await instance.housed.end()
    subject.started = True
    return f"reset for {task.id or task.question!r:.60}"
