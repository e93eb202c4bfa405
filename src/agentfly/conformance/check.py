"""The examination itself: one property after the other, each within its time.

It goes on in a thread with an event loop of its own, so that an environment that holds its loop up is found out too.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Any

from agentfly.conformance import acting, comparing, drawing, leaving, making, rewarding
from agentfly.conformance.clock import Stopwatch, time_limit
from agentfly.conformance.report import Broken, Finding, NotApplicable, Report, Verdict
from agentfly.conformance.subject import Subject, told_of
from agentfly.environment import Environment
from agentfly.errors import ConfigError, DataError
from agentfly.threads import call
from agentfly.types import Task

Property = Callable[[Subject], Awaitable[str] | str]

PROPERTIES: dict[str, Property] = {
    "constructor": making.constructor,
    "tools documented": making.tools_documented,
    "starts": making.starts,
    "tasks by seed": drawing.drawn_by_seed,
    "splits disjoint": drawing.splits_disjoint,
    "rows are JSON": drawing.rows_kept,
    "determinism": comparing.determinism,
    "reset isolation": comparing.reset_isolation,
    "concurrent instances": comparing.concurrent_instances,
    "bad actions": acting.bad_actions,
    "bad tasks": acting.bad_tasks,
    "cancellation": acting.cancellation,
    "close releases": leaving.close_releases,
    "no global state": leaving.no_global_state,
    "expert solves": rewarding.expert_solves,
    "reward bounds": rewarding.reward_bounds,
}
"""What is examined, in this order. A plain function is run in a thread."""
OF_THE_CLASS = ("constructor", "tools documented", "starts", "tasks by seed", "splits disjoint", "rows are JSON")
"""What can be seen without an instance."""
GRACE = 15.0
"""Seconds beyond its time after which a property holds up the event loop itself."""


def check_environment(
    kind: type[Environment],
    *,
    tasks: Iterable[Any] = (),
    seed: int = 0,
    instances: int = 4,
    seconds: float = 120.0,
    told: Callable[[Finding], None] | None = None,
) -> Report:
    """Run an environment through the contract.

    Args:
        kind: The environment's class.
        tasks: Tasks to use instead of those that it draws.
        seed: What tasks are drawn by, and calls are made up by.
        instances: How many are used at once.
        seconds: CPU time that each property may take; five times as many seconds by the clock end it in any case.
        told: Called with each finding as it comes.

    Raises:
        ConfigError: Something that it needs is not installed here, or not set.
    """
    given = [Task.of(each, str(number)) for number, each in enumerate(tasks)]
    most = kind.pool.max_instances
    subject = Subject(kind, given, seed, instances if most is None else min(instances, most), seconds)
    found: queue.SimpleQueue[Finding | BaseException | None] = queue.SimpleQueue()
    running: list[Callable[[], object]] = []
    thread = threading.Thread(target=_examine, args=(subject, found, running), name="agentfly-check", daemon=True)
    thread.start()
    findings: list[Finding] = []
    try:
        while (finding := _awaited(found, list(PROPERTIES)[len(findings) :], seconds)) is not None:
            if isinstance(finding, BaseException):
                raise finding
            findings.append(finding)
            if told is not None:
                told(finding)
            if finding.seen == HELD_UP:
                subject.given_up = True
                break
        else:
            thread.join()
    except KeyboardInterrupt:
        for cancel in running:
            cancel()
            thread.join(GRACE)  # it closes the instances that it has started
        raise
    return Report(f"{kind.__module__}:{kind.__qualname__}", tuple(findings))


HELD_UP = "it holds up the event loop: nothing else can go on beside it; the rest cannot be examined"


def _awaited(
    found: queue.SimpleQueue[Finding | BaseException | None], left: list[str], seconds: float
) -> Finding | BaseException | None:
    watch = Stopwatch()
    while not watch.exceeds(seconds + GRACE):
        with suppress(queue.Empty):
            return found.get(timeout=min(1.0, seconds + GRACE))
    return Finding(left[0] if left else "end", Verdict.FAIL, HELD_UP)


def _examine(
    subject: Subject, found: queue.SimpleQueue[Finding | BaseException | None], running: list[Callable[[], object]]
) -> None:
    """Examine all properties in a new event loop; `running` gets a function that cancels this from another thread."""

    async def all_of_them() -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        running.append(lambda: loop.call_soon_threadsafe(task.cancel))
        for name, examine in PROPERTIES.items():
            if subject.given_up:
                return
            if name not in OF_THE_CLASS and not subject.started:
                found.put(Finding(name, Verdict.NOT_APPLICABLE, "it does not start"))
            else:
                found.put(await _finding(name, examine, subject))

    try:
        asyncio.run(all_of_them())
        found.put(None)
    except BaseException as error:
        found.put(error)


async def _finding(name: str, examine: Property, subject: Subject) -> Finding:
    limit: asyncio.Timeout | None = None
    try:
        async with time_limit(subject.seconds) as limit:
            return Finding(name, Verdict.PASS, await call(examine, subject))
    except NotApplicable as reason:
        return Finding(name, Verdict.NOT_APPLICABLE, str(reason))
    except Broken as seen:
        return Finding(name, Verdict.FAIL, str(seen))
    except ConfigError as error:
        if not subject.started and not isinstance(error, DataError):
            raise  # a package or a setting is missing here: the user's to mend
        return Finding(name, Verdict.FAIL, told_of(error))
    except Exception as error:
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        if limit is not None and limit.expired():
            return Finding(name, Verdict.FAIL, f"it takes longer than {subject.seconds:g} s")
        return Finding(name, Verdict.FAIL, f"it raised {told_of(error)}")
