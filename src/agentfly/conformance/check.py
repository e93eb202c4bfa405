"""Runs the properties one after the other, each under a time limit.

They run in a thread with its own event loop, so that an environment that blocks its event loop is detected too.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Any

from agentfly.conformance import chain_properties, class_properties, outcome_properties
from agentfly.conformance.clock import Stopwatch, time_limit
from agentfly.conformance.subject import (
    ConformanceReport,
    NotApplicable,
    PropertyFailed,
    PropertyResult,
    PropertyStatus,
    Subject,
    format_error,
)
from agentfly.environment import Environment
from agentfly.errors import ConfigError, DataError
from agentfly.rollout.config import parse_tasks
from agentfly.threads import call

Property = Callable[[Subject], Awaitable[str] | str]

CLASS_PROPERTIES: dict[str, Property] = {
    "constructor": class_properties.constructor,
    "tools documented": class_properties.tools_have_descriptions,
    "starts": class_properties.starts,
    "tasks by seed": class_properties.seeds_reproduce_tasks,
    "splits disjoint": class_properties.splits_disjoint,
    "rows are JSON": class_properties.rows_are_json,
}
"""Properties that are checked even if no instance can be started."""
PROPERTIES: dict[str, Property] = {
    **CLASS_PROPERTIES,
    "determinism": chain_properties.determinism,
    "reset isolation": chain_properties.reset_isolation,
    "concurrent instances": chain_properties.concurrent_instances,
    "bad actions": chain_properties.bad_actions,
    "bad tasks": chain_properties.bad_tasks,
    "cancellation": chain_properties.cancellation,
    "close releases": outcome_properties.close_releases,
    "no global state": outcome_properties.no_global_state,
    "expert solves": outcome_properties.expert_solves,
    "reward bounds": outcome_properties.reward_bounds,
}
"""All properties, in the order they are checked. Plain functions run in a thread."""
GRACE = 15.0
"""Seconds past the time limit after which a property is considered to block the event loop."""
BLOCKED = "it blocks the event loop: nothing else can run concurrently; the remaining properties cannot be checked"


def check_environment(
    env_class: type[Environment],
    *,
    tasks: Iterable[Any] = (),
    seed: int = 0,
    instances: int = 4,
    seconds: float = 120.0,
    on_result: Callable[[PropertyResult], None] | None = None,
) -> ConformanceReport:
    """Check that an environment keeps the contract.

    Args:
        env_class: The environment's class.
        tasks: Tasks to use instead of those that it draws.
        seed: Seed of drawn tasks and generated calls.
        instances: Number of concurrent instances.
        seconds: CPU time limit of each property. Five times as many wall-clock seconds are a limit too.
        on_result: Called with each result as it becomes available.

    Raises:
        ConfigError: A package or setting that the environment needs is missing.
    """
    parsed_tasks = parse_tasks(tasks) if tasks else []
    limit = env_class.pool.max_instances
    subject = Subject(
        env_class, parsed_tasks, seed, instances=instances if limit is None else min(instances, limit), seconds=seconds
    )
    incoming: queue.SimpleQueue[PropertyResult | BaseException | None] = queue.SimpleQueue()
    cancel_callbacks: list[Callable[[], object]] = []
    thread = threading.Thread(
        target=_check_all, args=(subject, incoming, cancel_callbacks), name="agentfly-check", daemon=True
    )
    thread.start()
    results: list[PropertyResult] = []
    try:
        while (result := _next_result(incoming, list(PROPERTIES)[len(results) :], seconds)) is not None:
            if isinstance(result, BaseException):
                raise result
            results.append(result)
            if on_result is not None:
                on_result(result)
            if result.detail == BLOCKED:
                subject.abandoned = True
                break
        else:
            thread.join()
    except KeyboardInterrupt:
        for cancel in cancel_callbacks:
            cancel()
            thread.join(GRACE)  # it closes the instances that it started
        raise
    return ConformanceReport(f"{env_class.__module__}:{env_class.__qualname__}", tuple(results))


def _next_result(
    incoming: queue.SimpleQueue[PropertyResult | BaseException | None], remaining: list[str], seconds: float
) -> PropertyResult | BaseException | None:
    """Wait for the next result. None after the last one. A failure of the next property if none arrives in time."""
    watch = Stopwatch()
    while not watch.exceeds(seconds + GRACE):
        with suppress(queue.Empty):
            return incoming.get(timeout=min(1.0, seconds + GRACE))
    return PropertyResult(remaining[0] if remaining else "end", PropertyStatus.FAIL, BLOCKED)


def _check_all(
    subject: Subject,
    results: queue.SimpleQueue[PropertyResult | BaseException | None],
    cancel_callbacks: list[Callable[[], object]],
) -> None:
    """Check all properties in a new event loop; append a function that cancels this from another thread."""

    async def check_all() -> None:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        cancel_callbacks.append(lambda: loop.call_soon_threadsafe(task.cancel))
        for name, check in PROPERTIES.items():
            if subject.abandoned:
                return
            if name not in CLASS_PROPERTIES and not subject.started:
                results.put(PropertyResult(name, PropertyStatus.NOT_APPLICABLE, "it does not start"))
            else:
                results.put(await _check_property(name, check, subject))

    try:
        asyncio.run(check_all())
        results.put(None)
    except BaseException as error:
        results.put(error)


async def _check_property(name: str, check: Property, subject: Subject) -> PropertyResult:
    limit: asyncio.Timeout | None = None
    try:
        async with time_limit(subject.seconds) as limit:
            return PropertyResult(name, PropertyStatus.PASS, await call(check, subject))
    except NotApplicable as reason:
        return PropertyResult(name, PropertyStatus.NOT_APPLICABLE, str(reason))
    except PropertyFailed as failure:
        return PropertyResult(name, PropertyStatus.FAIL, str(failure))
    except ConfigError as error:
        if not subject.started and not isinstance(error, DataError):
            raise  # a package or a setting is missing on this machine
        return PropertyResult(name, PropertyStatus.FAIL, format_error(error))
    except Exception as error:
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        if limit is not None and limit.expired():
            return PropertyResult(name, PropertyStatus.FAIL, f"it takes longer than {subject.seconds:g} s")
        return PropertyResult(name, PropertyStatus.FAIL, f"it raised {format_error(error)}")
