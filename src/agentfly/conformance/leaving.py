"""Properties of what an environment leaves behind: nothing that it held, and nothing that others would notice."""

from __future__ import annotations

import asyncio
import os
import random
import sys
import threading
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from agentfly.conformance.clock import Stopwatch, descendants
from agentfly.conformance.report import Broken, NotApplicable
from agentfly.conformance.subject import Subject
from agentfly.environment import Environment
from agentfly.types import Task

PATIENCE = 5.0
"""Seconds that what was closed has to be gone."""
DEPTH = 4
_POOLED = "agentfly"
"""The name of threads that plain functions run in, which stay for the next one."""


async def close_releases(subject: Subject) -> str:
    """What instances held is given back: threads, file descriptors and processes are as many as before.

    The first instances may leave what later ones share; so the second lot is counted.
    """
    if sys.platform != "linux":
        raise NotApplicable("there is no /proc here to count in")
    tasks = subject.tasks(subject.instances)
    await _lived(subject, tasks)
    before = await _settled({})
    await _lived(subject, tasks)
    after = await _settled(before)
    for what, count in before.items():
        if after[what] > count:
            raise Broken(f"{after[what] - count} {what} are left of {len(tasks)} instances")
    return f"{', '.join(before)} are as many as before {len(tasks)} instances"


async def _lived(subject: Subject, tasks: list[Task]) -> None:
    manager = subject.manager(len(tasks))

    async def live(task: Task) -> None:
        async with subject.visit(manager, task) as visitor:
            await visitor.replay(subject.probes(task))

    try:
        async with asyncio.TaskGroup() as running:
            for task in tasks:
                running.create_task(live(task))
    finally:
        await manager.close()


async def _settled(expected: Mapping[str, int]) -> dict[str, int]:
    """The counts, once they are as expected or have had their time."""
    watch = Stopwatch()
    while True:
        now = held()
        if all(now[what] <= count for what, count in expected.items()) or watch.exceeds(PATIENCE):
            return now
        await asyncio.sleep(0.05)


def held() -> dict[str, int]:
    """What this process holds. Threads that wait for the next plain function are nobody's."""
    here = threading.enumerate()
    native = max(len(os.listdir("/proc/self/task")) - len(here), 0)
    named = sum(thread.name != _POOLED for thread in here)
    return {
        "threads": native + named,
        "file descriptors": len(os.listdir("/proc/self/fd")),
        "processes": sum(1 for _ in descendants()),
    }


async def no_global_state(subject: Subject) -> str:
    """A chain changes nothing outside its instance: no class, no module, no variable of the process.

    A cache that later chains share is no state: it is filled by two chains first, and a third, of a task that was
    there, must change nothing.
    """
    subject.refuse_shared()
    first, second = subject.tasks(2)
    await _lived(subject, [first])
    await _lived(subject, [second])
    before = _surroundings(subject.kind)
    await _lived(subject, [first])
    after = _surroundings(subject.kind)
    if changed := sorted(name for name in {*before, *after} if before.get(name) != after.get(name)):
        raise Broken(f"a chain changed {', '.join(changed[:5])}")
    return f"{len(before)} variables of class, module and process are as they were"


def _surroundings(kind: type[Environment]) -> dict[str, Any]:
    own = [each for each in kind.__mro__ if issubclass(each, Environment) and each is not Environment]
    numpy = sys.modules.get("numpy")
    out: dict[str, Any] = {
        "the working folder": os.getcwd(),
        "random's state": random.getstate(),
        "numpy.random's state": repr(numpy.random.get_state()) if numpy else None,
        **{f"os.environ[{name!r}]": value for name, value in os.environ.items()},
    }
    for each in own:
        out |= {f"{each.__name__}.{name}": _form(value, DEPTH) for name, value in vars(each).items()}
        module = sys.modules.get(each.__module__)
        if isinstance(module, ModuleType):
            names = {name: value for name, value in vars(module).items() if not name.startswith("__")}
            out |= {f"{module.__name__}.{name}": _form(value, DEPTH) for name, value in names.items()}
    return out


def _form(value: Any, depth: int) -> Any:
    """Something that is equal as long as the value is: containers by what they hold, other things by themselves."""
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    if depth and isinstance(value, Mapping):
        return {repr(key): _form(each, depth - 1) for key, each in value.items()}
    if depth and isinstance(value, list | tuple):
        return [_form(each, depth - 1) for each in value]
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    return id(value)
