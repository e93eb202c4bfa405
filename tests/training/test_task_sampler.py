"""The order of tasks: determined by the seed, and resumable."""

from __future__ import annotations

import pytest

from agentfly.errors import ConfigError
from agentfly.training.rollout_batch import TaskSampler
from agentfly.types import Task

TASKS = [Task.of(f"q{number}", str(number)) for number in range(7)]


def ids(feed: TaskSampler, count: int) -> list[str]:
    return [task.id for task in feed.take(count)]


def test_every_pass_has_each_task_once_in_an_order_of_its_own() -> None:
    feed = TaskSampler(TASKS, seed=0)
    passes = [ids(feed, 7) for _ in range(4)]
    assert all(sorted(each) == [task.id for task in TASKS] for each in passes)
    assert len({tuple(each) for each in passes}) > 1


def test_the_seed_fixes_the_order() -> None:
    assert ids(TaskSampler(TASKS, 3), 30) == ids(TaskSampler(TASKS, 3), 30)
    assert ids(TaskSampler(TASKS, 3), 30) != ids(TaskSampler(TASKS, 4), 30)


@pytest.mark.parametrize("taken", [0, 1, 6, 7, 8, 20])
def test_sampler_resumes_from_a_saved_position(taken: int) -> None:
    whole = ids(TaskSampler(TASKS, 0), 30)
    first = TaskSampler(TASKS, 0)
    assert ids(first, taken) + ids(TaskSampler(TASKS, 0, first.position), 30 - taken) == whole


def test_empty_dataset_is_rejected() -> None:
    with pytest.raises(ConfigError, match="no tasks were given"):
        TaskSampler([], 0)
