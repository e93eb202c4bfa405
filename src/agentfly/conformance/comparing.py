"""Properties seen by doing the same again: alone, after another chain, beside others."""

from __future__ import annotations

import asyncio

from agentfly.conformance.report import Broken
from agentfly.conformance.subject import Subject
from agentfly.conformance.visit import Trace
from agentfly.types import Task


async def determinism(subject: Subject) -> str:
    """The same task and the same calls give the same observations, and leave the same state."""
    subject.refuse_without_tools()
    subject.refuse_shared()
    subject.refuse_random()
    calls = 0
    for task in subject.tasks(2):
        once = await subject.trace(task)
        again = await _replayed(subject, task, once)
        if difference := once.difference(again):
            subject.deterministic = False
            raise Broken(difference)
        calls += len(once.calls)
    return f"{calls} calls in 2 tasks were answered alike twice"


async def reset_isolation(subject: Subject) -> str:
    """An instance that has served one chain is for the next as a fresh one is."""
    subject.refuse_without_tools()
    subject.refuse_shared()
    subject.refuse_random()
    first, second = subject.tasks(2)
    fresh, before = await subject.trace(second), await subject.trace(first)
    manager = subject.manager()
    try:
        async with subject.visit(manager, first) as visitor:
            await visitor.replay(before.calls)
            await visitor.replay(subject.probes(first))
        async with subject.visit(manager, second) as visitor:
            used = await visitor.replay(fresh.calls)
    finally:
        await manager.close()
    if difference := fresh.difference(used):
        subject.isolated = False
        raise Broken(f"after another chain, {difference}")
    return f"{len(fresh.calls)} calls after another chain as in a fresh instance"


async def concurrent_instances(subject: Subject) -> str:
    """Instances that are used at once do not notice each other."""
    subject.refuse_without_tools()
    subject.refuse_shared()
    subject.refuse_random()
    tasks = subject.tasks(subject.instances)
    alone = [await subject.trace(task) for task in tasks]
    manager = subject.manager(len(tasks))

    async def beside(task: Task, trace: Trace) -> Trace:
        async with subject.visit(manager, task) as visitor:
            return await visitor.replay(trace.calls)

    try:
        async with asyncio.TaskGroup() as running:
            begun = [running.create_task(beside(*each)) for each in zip(tasks, alone, strict=True)]
    finally:
        await manager.close()
    for trace, other in zip(alone, begun, strict=True):
        if difference := trace.difference(other.result()):
            raise Broken(f"beside {len(tasks) - 1} others, {difference}")
    return f"{len(tasks)} at once as each alone"


async def _replayed(subject: Subject, task: Task, trace: Trace) -> Trace:
    manager = subject.manager()
    try:
        async with subject.visit(manager, task) as visitor:
            return await visitor.replay(trace.calls)
    finally:
        await manager.close()
