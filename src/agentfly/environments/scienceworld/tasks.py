"""The thirty tasks, and their variations in the official splits, as the simulator tells them.

The official split `dev` is `validation`. A variation is in one split, whatever the simplification.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from agentfly.environments.data import checked_split
from agentfly.environments.scienceworld import jvm
from agentfly.environments.scienceworld.simulator import Variation
from agentfly.errors import DataError
from agentfly.extras import needed
from agentfly.types import Task

SIMPLIFICATIONS = (
    "easy",
    "teleportAction",
    "selfWateringFlowerPots",
    "openContainers",
    "openDoors",
    "noElectricalAction",
)
"""What makes a world easier; `easy` is all of the others that the task allows."""
_ELECTRICAL = ("power-component", "conductivity")


@functools.cache
def task_names() -> tuple[str, ...]:
    """The thirty tasks."""
    with needed("ScienceWorld", "scienceworld"):
        from scienceworld.constants import ID2TASK
    return tuple(ID2TASK.values())


def variation_of(task: Task) -> Variation:
    """What the columns of a task name."""
    name, number = task.columns.get("task_name"), task.columns.get("variation_idx")
    simplification = task.columns.get("simplification", "easy")
    if name is None or number is None:
        raise DataError(
            f"task {task.id!r} needs the columns 'task_name' and 'variation_idx'; "
            "ScienceWorld.draw_tasks and official_tasks make such rows"
        )
    if isinstance(number, bool) or not isinstance(number, int):
        raise DataError(f"the column 'variation_idx' is a whole number, not {number!r:.80}")
    return Variation(_known(name), number, _checked_simplification(simplification, name))


def _known(name: Any) -> str:
    if not isinstance(name, str) or name not in task_names():
        raise DataError(f"there is no task {name!r:.80}; there are {', '.join(task_names())}")
    return name


def _checked_simplification(given: Any, name: str) -> str:
    parts = given.split(",") if isinstance(given, str) else [given]
    for part in parts if given != "" else ():
        if part not in SIMPLIFICATIONS:
            there = ", ".join(SIMPLIFICATIONS)
            raise DataError(f"there is no simplification {part!r:.80}; there are {there}, with commas between, or none")
    if "noElectricalAction" in parts and any(each in name for each in _ELECTRICAL):
        raise DataError(f"{name} is about electricity, so noElectricalAction leaves no way to do it")
    return str(given)


def draw_tasks(
    split: str, count: int, seed: int, tasks: Sequence[str] | None, simplification: str
) -> list[dict[str, Any]]:
    """So many variations of a split; the tasks take turns, and each variation comes once."""
    names = _names(tasks, simplification)
    random.Random(f"scienceworld {seed}").shuffle(names)
    with _process() as process:
        queues = [_variations(process, checked_split(split), name, simplification, seed) for name in names]
        drawn = list(itertools.islice(_in_turn(queues), max(count, 0)))
        if len(drawn) < count:
            raise DataError(f"the split {split} has {len(drawn)} variations of {', '.join(names)}, not {count}")
        return [_row(process, each) for each in drawn]


def official_tasks(
    split: str = "test", tasks: Sequence[str] | None = None, simplification: str = "easy"
) -> list[dict[str, Any]]:
    """Every variation of a split: of all thirty tasks, or of those that are named."""
    names = _names(tasks, simplification)
    with _process() as process:
        queues = [_variations(process, checked_split(split), name, simplification) for name in names]
        return [_row(process, each) for each in itertools.chain(*queues)]


def _names(tasks: Sequence[str] | None, simplification: str) -> list[str]:
    if isinstance(tasks, str):
        raise DataError(f"tasks is a list of names, not {tasks!r:.80}")
    names = [_known(name) for name in (task_names() if tasks is None else dict.fromkeys(tasks))]
    for name in names:
        _checked_simplification(simplification, name)
    return names


@contextmanager
def _process() -> Iterator[jvm.JVM]:
    process = jvm.reserve()
    try:
        yield process
    finally:
        jvm.release(process)


def _in_turn(queues: list[Iterator[Variation]]) -> Iterator[Variation]:
    """One of each, over and over; a queue is asked for its first only when its turn comes."""
    while queues:
        for queue in tuple(queues):
            try:
                yield next(queue)
            except StopIteration:
                queues.remove(queue)


def _variations(
    process: jvm.JVM, split: str, name: str, simplification: str, seed: int | None = None
) -> Iterator[Variation]:
    """The variations of a task in a split, in the order of a seed, or in that of their numbers."""
    numbers = list(_splits(process, name)[split])
    if seed is not None:
        random.Random(f"scienceworld {seed} {name}").shuffle(numbers)
    for number in numbers:
        yield Variation(name, number, simplification)


_KNOWN_SPLITS: dict[str, dict[str, tuple[int, ...]]] = {}


def _splits(process: jvm.JVM, name: str) -> dict[str, tuple[int, ...]]:
    """The numbers of a task's variations in each split. The simulator tells them of a task that is loaded."""

    def told(interface: Any) -> dict[str, tuple[int, ...]]:
        Variation(name, 0).load(interface)
        ways = {"train": interface.getVariationsTrain, "validation": interface.getVariationsDev}
        ways["test"] = interface.getVariationsTest
        return {split: tuple(way()) for split, way in ways.items()}

    if name not in _KNOWN_SPLITS:
        _KNOWN_SPLITS[name] = process.aside(told)
    return _KNOWN_SPLITS[name]


def _row(process: jvm.JVM, variation: Variation) -> dict[str, Any]:
    return {
        "id": f"{variation.task}/{variation.number}",
        "question": process.aside(lambda interface: _description(interface, variation)),
        "task_name": variation.task,
        "variation_idx": variation.number,
        "simplification": variation.simplification,
    }


def _description(interface: Any, variation: Variation) -> str:
    """What is to be done. Most tasks tell it without being loaded, which takes a hundred times as long."""
    if "inclined-plane" in variation.task:  # names its two planes in an order that only loading settles
        variation.load(interface)
        return str(interface.getTaskDescription()).strip()
    task = interface.taskMaker().getTask(variation.task).get()
    goals = task.setupGoals(task.getCombination(variation.number), variation.number)
    return str(goals.description()).strip()
