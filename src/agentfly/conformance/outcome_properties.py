"""Properties of what chains leave behind and earn: resources, global state, the expert's reward and its bounds."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import sys
import threading
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import psutil  # type: ignore[import-untyped]

from agentfly.conformance.clock import Stopwatch, descendants
from agentfly.conformance.subject import NotApplicable, PropertyFailed, Subject
from agentfly.environment import Environment, has_tasks
from agentfly.errors import ConfigError
from agentfly.sft.demonstrations import demonstrate
from agentfly.types import Task

RELEASE_TIMEOUT = 5.0
"""Seconds until the resources of closed instances must be released."""
LEAK_BATCHES = 2
"""Batches of instances that all have to leave something, for it to be a leak."""
DEPTH = 4
"""Nesting depth to which variables are compared."""
_POOL_THREAD = "agentfly"
"""Name of the reusable threads that run plain functions."""
FULL_REWARD = 1.0
"""Minimum reward of a chain that solves its task."""
MAX_TURNS = 300


async def close_releases(subject: Subject) -> str:
    """Closed instances leave no threads, file descriptors or processes.

    The first instances may create resources that later ones share, so the next batches are measured. A leak repeats in
    each of them. What is created once, such as the OpenMP helper of a pool thread, does not.
    """
    if sys.platform != "linux":
        raise NotApplicable("counting resources needs /proc")
    tasks = subject.tasks(subject.instances)
    await _run_chains(subject, tasks)
    for _ in range(LEAK_BATCHES):
        counts_before = count_resources()
        threads_before = set(threading.enumerate())
        await _run_chains(subject, tasks)
        watch = Stopwatch()
        while True:  # resources may take a moment to be released
            counts_after = count_resources()
            left = [name for name, count in counts_before.items() if counts_after[name] > count]
            if not left:
                return f"{', '.join(counts_before)} are as many as before {len(tasks)} instances"
            if watch.exceeds(RELEASE_TIMEOUT):
                break
            await asyncio.sleep(0.05)
    names = sorted({thread.name for thread in set(threading.enumerate()) - threads_before} - {_POOL_THREAD})
    named = f": {', '.join(names[:5])}" if left[0] == "threads" and names else ""
    raise PropertyFailed(
        f"{counts_after[left[0]] - counts_before[left[0]]} {left[0]} are left of {len(tasks)} instances{named}"
    )


def count_resources() -> dict[str, int]:
    """Count the threads, file descriptors and child processes of this process, without idle pool threads."""
    gc.collect()  # what earlier code left unreachable is not counted
    python_threads = threading.enumerate()
    process = psutil.Process()
    native = max(process.num_threads() - len(python_threads), 0)
    return {
        "threads": native + sum(thread.name != _POOL_THREAD for thread in python_threads),
        "file descriptors": process.num_fds(),
        "processes": len(descendants()),
    }


async def no_global_state(subject: Subject) -> str:
    """A chain changes no variable of a class, a module or the process.

    Caches that chains share are allowed: two chains fill them, then a third with the first task must change nothing.
    """
    subject.require_reset()
    first, second = subject.tasks(2)
    await _run_chains(subject, [first])
    await _run_chains(subject, [second])
    variables_before = _global_variables(subject.env_class)
    await _run_chains(subject, [first])
    variables_after = _global_variables(subject.env_class)
    if changed := sorted(
        name
        for name in {*variables_before, *variables_after}
        if variables_before.get(name) != variables_after.get(name)
    ):
        raise PropertyFailed(f"a chain changed {', '.join(changed[:5])}")
    return f"{len(variables_before)} variables of class, module and process are unchanged"


async def _run_chains(subject: Subject, tasks: list[Task]) -> None:
    """Make valid calls in one instance per task, concurrently, and close the instances."""
    async with subject.manager(len(tasks)) as manager, asyncio.TaskGroup() as group:
        for task in tasks:
            group.create_task(subject.replay(manager, task, subject.valid_calls(task)))


def _global_variables(env_class: type[Environment]) -> dict[str, Any]:
    numpy = sys.modules.get("numpy")
    variables: dict[str, Any] = {
        "the working folder": os.getcwd(),
        "random's state": random.getstate(),
        "numpy.random's state": repr(numpy.random.get_state()) if numpy else None,
        **{f"os.environ[{name!r}]": value for name, value in os.environ.items()},
    }
    for cls in env_class.__mro__:
        if not issubclass(cls, Environment) or cls is Environment:
            continue
        variables |= {f"{cls.__name__}.{name}": _snapshot(value, DEPTH) for name, value in vars(cls).items()}
        module = sys.modules.get(cls.__module__)
        if isinstance(module, ModuleType):
            variables |= {
                f"{module.__name__}.{name}": _snapshot(value, DEPTH)
                for name, value in vars(module).items()
                if not name.startswith("__")
            }
    return variables


def _snapshot(value: Any, depth: int) -> Any:
    """Return something comparable: containers by content down to `depth`, other objects by identity."""
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    if depth and isinstance(value, Mapping):
        return {repr(key): _snapshot(member, depth - 1) for key, member in value.items()}
    if depth and isinstance(value, list | tuple):
        return [_snapshot(member, depth - 1) for member in value]
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    return id(value)


async def expert_solves(subject: Subject) -> str:
    """The expert solves a sample of every split through the tools, under the manager."""
    _require_tasks_and_reward(subject)
    if not subject.has_expert:
        raise NotApplicable("it has no expert")
    if subject.reward is None:
        raise NotApplicable("it names no reward (scored_by)")
    async with subject.agent() as agent:
        for split, tasks in subject.samples.items():
            expert = await demonstrate(agent, tasks, threshold=FULL_REWARD, max_turns=MAX_TURNS)
            subject.demonstrations[split] = expert
            if expert.rejected:
                reasons = "; ".join(f"{count} × {reason:.120}" for reason, count in expert.reasons.items())
                raise PropertyFailed(
                    f"{len(expert.rejected)} of {len(tasks)} tasks of {split} are not solved: {reasons}"
                )
    count = sum(map(len, subject.samples.values()))
    reward = f" with {subject.env_class.scored_by} ≥ {FULL_REWARD:g}"
    return f"it solves {count} of {count} tasks of {', '.join(subject.samples)}{reward}"


async def reward_bounds(subject: Subject) -> str:
    """A chain without calls earns less than the full reward, and no more than the expert."""
    _require_tasks_and_reward(subject)
    if subject.reward is None:
        raise NotApplicable("it names no reward (scored_by)")
    best_reward = 0.0
    async with subject.agent() as agent:
        for split, tasks in subject.samples.items():
            for chain in await agent.run(tasks):
                if chain.reward is None:
                    reason = chain.failures[-1].message if chain.failures else chain.stop.value
                    raise PropertyFailed(f"a chain without calls has no reward: {reason:.200}")
                best_reward = max(best_reward, chain.reward)
            expert = subject.demonstrations.get(split)
            rewards = [chain.reward for chain in expert.accepted if chain.reward is not None] if expert else []
            lowest_reward = min(rewards, default=None)
            if best_reward >= FULL_REWARD or (lowest_reward is not None and best_reward > lowest_reward):
                comparison = "" if lowest_reward is None else f", the expert {lowest_reward:g}"
                raise PropertyFailed(f"a chain without calls earns {best_reward:g} in {split}{comparison}")
    return f"chains without calls earn at most {best_reward:g}"


def _require_tasks_and_reward(subject: Subject) -> None:
    subject.require_tools()
    if not subject.caller_tasks and not has_tasks(subject.env_class):
        raise NotApplicable("it draws no tasks of its own, and none were given")
    try:
        _ = subject.reward
    except ConfigError as error:
        raise PropertyFailed(f"scored_by: {error}") from None
