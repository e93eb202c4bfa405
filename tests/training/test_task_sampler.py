"""The order of tasks: determined by the seed, and resumable."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from agentfly.errors import ConfigError
from agentfly.training.task_sampler import DifficultySampler, TaskSampler
from agentfly.types import Task

TASKS = [Task.of(f"q{number}", str(number)) for number in range(7)]


def ids(feed: TaskSampler, count: int) -> list[str]:
    return [task.id for task in feed.take(count)]


def test_every_pass_has_each_task_once_in_an_order_of_its_own() -> None:
    feed = TaskSampler(TASKS, seed=0)
    passes = [ids(feed, 7) for _ in range(4)]
    assert all(sorted(names) == [task.id for task in TASKS] for names in passes)
    assert len({tuple(names) for names in passes}) > 1


def test_the_seed_fixes_the_order() -> None:
    assert ids(TaskSampler(TASKS, 3), 30) == ids(TaskSampler(TASKS, 3), 30)
    assert ids(TaskSampler(TASKS, 3), 30) != ids(TaskSampler(TASKS, 4), 30)


@pytest.mark.parametrize("taken", [0, 1, 6, 7, 8, 20])
def test_sampler_resumes_from_a_saved_position(taken: int) -> None:
    whole = ids(TaskSampler(TASKS, 0), 30)
    first = TaskSampler(TASKS, 0)
    assert ids(first, taken) + ids(TaskSampler(TASKS, 0, first.position), 30 - taken) == whole


def observe(feed: TaskSampler, rewards: dict[str, list[float]]) -> None:
    for task in TASKS:
        if task.id in rewards:
            feed.observe(task, rewards[task.id])


def test_tasks_of_medium_success_are_preferred() -> None:
    feed = DifficultySampler(TASKS, seed=0)
    for _ in range(6):
        observe(feed, {"0": [0.0] * 8, "1": [1.0] * 8, "2": [0.0, 1.0] * 4})
    drawn = Counter(name for _ in range(2000) for name in ids(feed, 1))
    # p (1 − p) is 0.25 for task 2 and those not seen; p is 1/18 and 17/18 for tasks 0 and 1.
    assert drawn["2"] / drawn["0"] > 3
    assert drawn["2"] / drawn["1"] > 3
    assert drawn["2"] / drawn["3"] == pytest.approx(1, abs=0.25)
    # An estimate follows what the model has learned since.
    for _ in range(4):
        observe(feed, {"0": [0.0, 1.0] * 4, "2": [1.0] * 8})
    drawn = Counter(name for _ in range(2000) for name in ids(feed, 1))
    assert drawn["0"] > 2 * drawn["2"]


def test_tasks_of_a_step_are_distinct_while_there_are_enough() -> None:
    feed = DifficultySampler(TASKS, seed=1)
    assert sorted(ids(feed, 7)) == [task.id for task in TASKS]
    assert Counter(ids(feed, 14)).most_common(1)[0][1] == 2


@pytest.mark.parametrize("taken", [0, 1, 5])
def test_estimates_are_saved_and_restored_exactly(taken: int) -> None:
    def draw(feed: TaskSampler, steps: range) -> list[list[str]]:
        out = []
        for step in steps:
            out.append(ids(feed, 3))
            observe(feed, {name: [(int(name) + step) % 3 / 2, 0.3] for name in out[-1]})
        return out

    whole = draw(DifficultySampler(TASKS, 0), range(12))
    first = DifficultySampler(TASKS, 0)
    first_tasks = draw(first, range(taken))
    resumed = DifficultySampler(TASKS, 0)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert first_tasks + draw(resumed, range(taken, 12)) == whole


def test_empty_dataset_is_rejected() -> None:
    with pytest.raises(ConfigError, match="no tasks were given"):
        TaskSampler([], 0)
