"""Sources of tasks: the official splits, as reported by the simulator."""

from __future__ import annotations

import itertools
import json

import pytest

from agentfly.environments.scienceworld import ScienceWorld, official_tasks
from agentfly.environments.scienceworld.tasks import task_names
from agentfly.errors import DataError
from agentfly.types import Task

pytestmark = pytest.mark.usefixtures("shared_java")


def ids(split: str, count: int, seed: int = 0, **settings: object) -> list[str]:
    return [row["id"] for row in ScienceWorld.draw_tasks(split, count, seed=seed, **settings)]  # type: ignore[arg-type]


def test_every_task_is_drawn_and_prefixes_are_stable() -> None:
    rows = ScienceWorld.draw_tasks("train", 32)
    assert len(task_names()) == 30
    assert {row["task_name"] for row in rows[:30]} == set(task_names())
    assert ScienceWorld.draw_tasks("train", 7) == rows[:7]
    assert ids("train", 7, seed=1) != [row["id"] for row in rows[:7]]
    assert json.loads(json.dumps(rows)) == rows


def test_splits_are_official_and_disjoint() -> None:
    boil = {split: [row["variation_idx"] for row in official_tasks(split, ["boil"])] for split in
            ("train", "validation", "test")}  # fmt: skip
    assert boil == {"train": list(range(14)), "validation": list(range(14, 21)), "test": list(range(21, 30))}
    drawn = {split: {task_id for seed in (0, 1) for task_id in ids(split, 30, seed, tasks=["melt", "grow-plant"])}
             for split in boil}  # fmt: skip
    assert not any(one & other for one, other in itertools.combinations(drawn.values(), 2))


async def test_question_is_the_task_description_of_the_simulator() -> None:
    """Among them a pair of inclined planes, whose order only loading settles."""
    env = ScienceWorld()
    await env.start()
    for row in ScienceWorld.draw_tasks("validation", 12, seed=3):
        await env.reset(Task.of(row))
        observation = (await env.scienceworld_step("task"))["observation"]
        assert observation.removeprefix("Task description:").strip() == row["question"]
    await env.close()


def test_unknown_names_are_rejected() -> None:
    with pytest.raises(DataError, match="there is no split 'dev'; there are train, validation, test"):
        ScienceWorld.draw_tasks("dev", 1)
    with pytest.raises(DataError, match="there is no task 'dance'"):
        ScienceWorld.draw_tasks("train", 1, tasks=["dance"])
    with pytest.raises(DataError, match="a list of names, not 'boil'"):
        ScienceWorld.draw_tasks("train", 1, tasks="boil")
    with pytest.raises(DataError, match="no simplification 'hard'"):
        ScienceWorld.draw_tasks("train", 1, simplification="hard")
    with pytest.raises(DataError, match="the split validation has 7 variations of boil, not 8"):
        ScienceWorld.draw_tasks("validation", 8, tasks=["boil"])
