"""Properties of chains: reproducible, isolated, and robust to invalid calls, bad tasks and cancellation."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from random import Random

from agentfly.conformance.clock import Stopwatch, time_limit
from agentfly.conformance.session import format_call, invalid_calls
from agentfly.conformance.subject import PropertyFailed, Subject, format_error
from agentfly.errors import EnvironmentFault
from agentfly.resources import ResourceManager
from agentfly.trajectory import CallStatus
from agentfly.types import Task, ToolCall

CANCEL_TIMEOUT = 10.0
"""Seconds until a cancelled call must have ended. The next chain may also take three times as long as one before."""
CANCEL_AFTER = (0.01, 1, 3, 10)
"""When a call is cancelled: an integer counts event loop iterations, a float seconds."""


async def determinism(subject: Subject) -> str:
    """The same task and the same calls give the same observations and the same final state."""
    subject.require_determinism()
    calls = 0
    for task in subject.tasks(2):
        first = await subject.trace(task)
        async with subject.manager() as manager:
            second = await subject.replay(manager, task, first.calls)
        if difference := first.difference(second):
            subject.deterministic = False
            raise PropertyFailed(difference)
        calls += len(first.calls)
    return f"{calls} calls in 2 tasks gave equal answers twice"


async def reset_isolation(subject: Subject) -> str:
    """An instance that has served one chain behaves like a fresh one for the next."""
    subject.require_determinism()
    first, second = subject.tasks(2)
    fresh = await subject.trace(second)
    first_trace = await subject.trace(first)
    async with subject.manager() as manager:
        async with subject.session(manager, first) as session:
            await session.replay(first_trace.calls)
            await session.replay(subject.valid_calls(first))
        used = await subject.replay(manager, second, fresh.calls)
    if difference := fresh.difference(used):
        subject.isolated = False
        raise PropertyFailed(f"after another chain, {difference}")
    return f"{len(fresh.calls)} calls after another chain gave the same answers as in a fresh instance"


async def concurrent_instances(subject: Subject) -> str:
    """Instances that are used concurrently do not affect each other."""
    subject.require_determinism()
    tasks = subject.tasks(subject.instances)
    alone = [await subject.trace(task) for task in tasks]
    async with subject.manager(len(tasks)) as manager, asyncio.TaskGroup() as group:
        replays = [
            group.create_task(subject.replay(manager, task, trace.calls))
            for task, trace in zip(tasks, alone, strict=True)
        ]
    for trace, replay in zip(alone, replays, strict=True):
        if difference := trace.difference(replay.result()):
            raise PropertyFailed(f"concurrently with {len(tasks) - 1} others, {difference}")
    return f"{len(tasks)} concurrent instances behaved as each alone"


async def bad_actions(subject: Subject) -> str:
    """Unknown tools, and arguments that are missing, of the wrong type or a megabyte long, are answered."""
    subject.require_tools()
    (task,) = subject.tasks(1)
    calls = list(invalid_calls(subject.toolbox, task, Random(subject.seed)))
    remaining = iter(calls)
    call = next(remaining, None)
    async with subject.manager() as manager:
        while call is not None:  # a new chain after each call that ends one
            async with subject.session(manager, task) as session:
                while call is not None:
                    try:
                        answer = await session.act(call)
                    except EnvironmentFault as fault:
                        raise PropertyFailed(
                            f"{format_call(call)} broke the environment: {format_error(fault)}"
                        ) from None
                    if answer.status in (CallStatus.ERROR, CallStatus.TIMEOUT):
                        raise PropertyFailed(f"{format_call(call)} was not answered, but raised: {answer.brief}")
                    call = next(remaining, None)
                    if answer.ends_chain:
                        break
    return f"{len(calls)} invalid calls were answered"


async def bad_tasks(subject: Subject) -> str:
    """A task without the required columns is rejected or tolerated; the next task works as usual."""
    subject.require_reset()
    (task,) = subject.tasks(1)
    bad = [Task(task.messages, dict.fromkeys(task.columns), "nothing"), Task(task.messages, {}, "no columns")]
    rejected = 0
    async with subject.manager() as manager:
        for bad_task in bad:
            try:
                async with subject.session(manager, bad_task):
                    pass
            except EnvironmentFault:
                rejected += 1
            async with subject.session(manager, task):
                pass
        failed_closes = await _count_failed_closes(manager)
    if failed_closes:
        raise PropertyFailed("an instance whose reset failed could not be closed; see the warnings")
    return f"{rejected} of {len(bad)} were rejected; the next chain worked as usual"


async def cancellation(subject: Subject) -> str:
    """After a call is cancelled, the instance can be closed, and the next chain works."""
    subject.require_tools()
    (task,) = subject.tasks(1)
    started_at = time.monotonic()
    trace = await subject.trace(task)
    timeout = CANCEL_TIMEOUT + 3 * (time.monotonic() - started_at)
    comparable = subject.deterministic and subject.isolated and subject.env_class.deterministic
    call = (*trace.calls, *subject.valid_calls(task))[0]
    try:
        async with subject.manager() as manager:
            for delay in CANCEL_AFTER:
                await _cancel_call(subject, manager, task, call=call, delay=delay, timeout=timeout)
            async with time_limit(timeout):
                replayed = await subject.replay(manager, task, trace.calls)
            failed_closes = await _count_failed_closes(manager)
    except TimeoutError:
        raise PropertyFailed(f"after a call was cancelled, the next chain waited more than {timeout:.0f} s") from None
    if failed_closes:
        raise PropertyFailed("an instance whose call was cancelled could not be closed; see the warnings")
    if comparable and (difference := trace.difference(replayed)):
        raise PropertyFailed(f"after a call was cancelled, {difference}")
    return f"{len(CANCEL_AFTER)} calls cancelled; the next chain worked as usual"


async def _cancel_call(
    subject: Subject, manager: ResourceManager, task: Task, *, call: ToolCall, delay: float, timeout: float
) -> None:
    """Cancel a call after `delay`; raise PropertyFailed if it keeps running or raises."""
    async with AsyncExitStack() as stack:
        async with time_limit(timeout):
            session = await stack.enter_async_context(subject.session(manager, task))
        running = asyncio.create_task(session.act(call))
        if isinstance(delay, int):
            for _ in range(delay):
                await asyncio.sleep(0)
        else:
            await asyncio.sleep(delay)
        running.cancel()
        watch = Stopwatch()
        while not running.done() and not watch.exceeds(CANCEL_TIMEOUT):
            await asyncio.wait([running], timeout=CANCEL_TIMEOUT / 10)
        if not running.done():
            raise PropertyFailed(f"{format_call(call)} ran for more than {CANCEL_TIMEOUT:g} s after it was cancelled")
        if not running.cancelled() and (error := running.exception()):
            raise PropertyFailed(f"{format_call(call)} raised when it was cancelled: {format_error(error)}")


async def _count_failed_closes(manager: ResourceManager) -> int:
    """Count the instances whose close failed, after pending closes."""
    while any(pool.closing for pool in manager.pool_metrics()):  # noqa: ASYNC110  (the manager has no event for it)
        await asyncio.sleep(0.01)
    return sum(pool.failed_closes for pool in manager.pool_metrics())
