"""Rows of the thirty tasks and their variations in the official splits, as the simulator defines them.

The official split `dev` is called `validation`. The split of a variation does not depend on the simplification.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from agentfly.environments.data import validate_split
from agentfly.environments.scienceworld import jvm
from agentfly.environments.scienceworld.jvm import Variation
from agentfly.errors import DataError, require_extra
from agentfly.types import Task

if TYPE_CHECKING:
    from agentfly.environments.scienceworld.java_process import JavaProcess

SIMPLIFICATIONS = (
    "easy", "teleportAction", "selfWateringFlowerPots", "openContainers", "openDoors", "noElectricalAction",
)  # fmt: skip
"""`easy` stands for all others that the task allows."""
_ELECTRICAL = ("power-component", "conductivity")


@functools.cache
def task_names() -> tuple[str, ...]:
    """Names of the thirty tasks."""
    with require_extra("ScienceWorld", "scienceworld"):
        from scienceworld.constants import ID2TASK
    return tuple(ID2TASK.values())


def read_variation(task: Task) -> Variation:
    """The variation in a task's columns, validated."""
    name, number = task.columns.get("task_name"), task.columns.get("variation_idx")
    if name is None or number is None:
        raise DataError(
            f"task {task.id!r} needs the columns 'task_name' and 'variation_idx'; "
            "ScienceWorld.draw_tasks and official_tasks make such rows"
        )
    if isinstance(number, bool) or not isinstance(number, int):
        raise DataError(f"the column 'variation_idx' must be an integer, not {number!r:.80}")
    simplification = task.columns.get("simplification", "easy")
    _validate(name, simplification)
    return Variation(name, number, simplification)


def _validate(name: Any, simplification: Any) -> None:
    """Raise DataError for an unknown task name, or a simplification that is unknown or rules the task out."""
    if not isinstance(name, str) or name not in task_names():
        raise DataError(f"there is no task {name!r:.80}; there are {', '.join(task_names())}")
    settings = simplification.split(",") if isinstance(simplification, str) else [simplification]
    for setting in settings if simplification != "" else ():
        if setting not in SIMPLIFICATIONS:
            raise DataError(
                f"there is no simplification {setting!r:.80}; there are {', '.join(SIMPLIFICATIONS)}, "
                "separated by commas, or an empty text for none"
            )
    if "noElectricalAction" in settings and any(word in name for word in _ELECTRICAL):
        raise DataError(f"{name} is about electricity, so noElectricalAction makes it unsolvable")


def draw_tasks(
    split: str = "train",
    count: int = 100,
    *,
    seed: int = 0,
    tasks: Sequence[str] | None = None,
    simplification: str = "easy",
) -> list[dict[str, Any]]:
    """Different variations of the official split, round-robin over `tasks` (None: all thirty)."""
    names = _select_tasks(tasks, simplification)
    random.Random(f"scienceworld {seed}").shuffle(names)
    with _reserve_jvm() as process:
        queues = [_variations(process, validate_split(split), name, simplification, seed=seed) for name in names]
        variations: list[Variation] = []
        # A queue is started only when its turn comes: the first access loads the task, which is slow.
        while queues and len(variations) < count:
            for queue in tuple(queues):
                if len(variations) == count:
                    break
                if (variation := next(queue, None)) is not None:
                    variations.append(variation)
                else:
                    queues.remove(queue)
        if len(variations) < count:
            raise DataError(f"the split {split} has {len(variations)} variations of {', '.join(names)}, not {count}")
        return [_make_row(process, variation) for variation in variations]


def official_tasks(
    split: str = "test", tasks: Sequence[str] | None = None, simplification: str = "easy"
) -> list[dict[str, Any]]:
    """All variations of a split, of the named tasks (None: all thirty)."""
    names = _select_tasks(tasks, simplification)
    with _reserve_jvm() as process:
        queues = [_variations(process, validate_split(split), name, simplification) for name in names]
        return [_make_row(process, variation) for variation in itertools.chain(*queues)]


def _select_tasks(tasks: Sequence[str] | None, simplification: str) -> list[str]:
    if isinstance(tasks, str):
        raise DataError(f"tasks is a list of names, not {tasks!r:.80}")
    names = list(task_names() if tasks is None else dict.fromkeys(tasks))
    for name in names:
        _validate(name, simplification)
    return names


@contextmanager
def _reserve_jvm() -> Iterator[JavaProcess]:
    process = jvm.reserve()
    try:
        yield process
    finally:
        jvm.release(process)


_SPLITS: dict[str, dict[str, tuple[int, ...]]] = {}
"""Cache: variation numbers by task name and split."""


def _variations(
    process: JavaProcess, split: str, name: str, simplification: str, *, seed: int | None = None
) -> Iterator[Variation]:
    """The variations of a task in a split, shuffled by `seed` (None: in ascending order)."""

    def read_splits(interface: Any) -> dict[str, tuple[int, ...]]:
        Variation(name, 0).load(interface)  # the simulator reports splits of the loaded task only
        return {
            "train": tuple(interface.getVariationsTrain()),
            "validation": tuple(interface.getVariationsDev()),
            "test": tuple(interface.getVariationsTest()),
        }

    if name not in _SPLITS:
        _SPLITS[name] = process.call_scratch(read_splits)
    numbers = list(_SPLITS[name][split])
    if seed is not None:
        random.Random(f"scienceworld {seed} {name}").shuffle(numbers)
    for number in numbers:
        yield Variation(name, number, simplification)


def _make_row(process: JavaProcess, variation: Variation) -> dict[str, Any]:
    def read_description(interface: Any) -> str:
        if "inclined-plane" in variation.task:  # the order of its two planes is fixed by loading only
            variation.load(interface)
            return str(interface.getTaskDescription()).strip()
        # Other tasks describe themselves without being loaded, which would take a hundred times as long.
        task = interface.taskMaker().getTask(variation.task).get()
        goals = task.setupGoals(task.getCombination(variation.number), variation.number)
        return str(goals.description()).strip()

    return {
        "id": f"{variation.task}/{variation.number}",
        "question": process.call_scratch(read_description),
        "task_name": variation.task,
        "variation_idx": variation.number,
        "simplification": variation.simplification,
    }
