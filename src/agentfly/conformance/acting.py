"""Properties of what a model does wrong: every call is answered, and one that is given up spoils nothing else."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from random import Random

from agentfly.conformance.clock import Stopwatch, time_limit
from agentfly.conformance.probing import hostile
from agentfly.conformance.report import Broken
from agentfly.conformance.subject import Subject, told_of
from agentfly.conformance.visit import brief
from agentfly.errors import EnvironmentFault
from agentfly.outcome import CallStatus
from agentfly.resources import ResourceManager
from agentfly.types import Task, ToolCall

PATIENCE = 10.0
"""Seconds that what was cancelled has to let go; a chain after it has three times as long as one took before, too."""
MOMENTS = (0.01, 1, 3, 10)
"""When an action is cancelled: after so many turns of the event loop, or seconds."""


async def bad_actions(subject: Subject) -> str:
    """Arguments that are missing, no text or a megabyte of it, and tools that are not there, are all answered."""
    subject.refuse_without_tools()
    (task,) = subject.tasks(1)
    calls = list(hostile(subject.toolbox, task, Random(subject.seed)))
    manager, left = subject.manager(), iter(calls)
    call = next(left, None)
    try:
        while call is not None:
            async with subject.visit(manager, task) as visitor:
                while call is not None:
                    try:
                        told = await visitor.act(call)
                    except EnvironmentFault as fault:
                        raise Broken(f"{brief(call)} broke the world: {told_of(fault)}") from None
                    if told.status is CallStatus.ERROR:
                        raise Broken(f"{brief(call)} was not answered, but raised: {told.brief}")
                    call = next(left, None)
                    if told.ends:
                        break
    finally:
        await manager.close()
    return f"{len(calls)} were answered"


async def bad_tasks(subject: Subject) -> str:
    """A task that lacks what the world needs is refused, or done without; the next one goes as usual."""
    subject.refuse_shared()
    (task,) = subject.tasks(1)
    bad = [Task(task.messages, dict.fromkeys(task.columns), "nothing"), Task(task.messages, {}, "no columns")]
    manager, refused = subject.manager(), 0
    try:
        for each in bad:
            try:
                async with subject.visit(manager, each):
                    pass
            except EnvironmentFault:
                refused += 1
            async with subject.visit(manager, task):
                pass
        failed = await _failed_closes(manager)
    finally:
        await manager.close()
    if failed:
        raise Broken("an instance whose reset failed could not be closed; see the warnings")
    return f"{refused} of {len(bad)} were refused; the next chain went as usual"


async def cancellation(subject: Subject) -> str:
    """An action that is given up in the middle leaves an instance that can be closed, and a world to go on in."""
    subject.refuse_without_tools()
    (task,) = subject.tasks(1)
    begun = time.monotonic()
    trace = await subject.trace(task)
    patience = PATIENCE + 3 * (time.monotonic() - begun)
    compares = subject.deterministic and subject.isolated and subject.kind.deterministic
    manager, call = subject.manager(), (*trace.calls, *subject.probes(task))[0]
    try:
        for moment in MOMENTS:
            await _given_up(subject, manager, task, call, moment, patience)
        async with time_limit(patience), subject.visit(manager, task) as visitor:
            after = await visitor.replay(trace.calls)
        failed = await _failed_closes(manager)
    except TimeoutError:
        raise Broken(f"after an action was cancelled, the next chain waited more than {patience:.0f} s") from None
    finally:
        await manager.close()
    if failed:
        raise Broken("an instance whose action was cancelled could not be closed; see the warnings")
    if compares and (difference := trace.difference(after)):
        raise Broken(f"after an action was cancelled, {difference}")
    return f"{len(MOMENTS)} actions given up; the next chain went as usual"


async def _given_up(
    subject: Subject, manager: ResourceManager, task: Task, call: ToolCall, moment: float, patience: float
) -> None:
    async with AsyncExitStack() as stack:
        async with time_limit(patience):
            visitor = await stack.enter_async_context(subject.visit(manager, task))
        acting = asyncio.create_task(visitor.act(call))
        if isinstance(moment, int):
            for _ in range(moment):
                await asyncio.sleep(0)
        else:
            await asyncio.sleep(moment)
        acting.cancel()
        watch = Stopwatch()
        while not acting.done() and not watch.exceeds(PATIENCE):
            await asyncio.wait([acting], timeout=PATIENCE / 10)
        if not acting.done():
            raise Broken(f"{brief(call)} went on for more than {PATIENCE:g} s after it was cancelled")
        if not acting.cancelled() and (error := acting.exception()):
            raise Broken(f"{brief(call)}, cancelled, raised {told_of(error)}")


async def _failed_closes(manager: ResourceManager) -> int:
    """How many instances could not be closed, once those that are being closed are."""
    while any(each.closing for each in manager.figures()):  # noqa: ASYNC110  (a manager tells it in figures only)
        await asyncio.sleep(0.01)
    return sum(each.failed_closes for each in manager.figures())
