"""The stream of tasks that a run trains on; its state is saved in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from agentfly.errors import ConfigError
from agentfly.types import Task


class TaskSampler:
    """An endless stream of tasks. Each epoch is its own permutation, determined by the seed.

    Its state is one number, so a resumed run continues with the next task.
    """

    def __init__(self, tasks: Sequence[Task], seed: int, position: int = 0) -> None:
        if not tasks:
            raise ConfigError("there is nothing to train on: no tasks were given")
        self._tasks = tasks
        self._seed = seed
        self.position = position
        """Number of tasks taken so far."""
        self._epoch = -1
        self._order = np.empty(0, np.int64)

    def take(self, count: int) -> list[Task]:
        """Take the next `count` tasks."""
        start = self.position
        self.position += count
        return [self.task_at(position) for position in range(start, self.position)]

    def observe(self, task: Task, rewards: Sequence[float]) -> None:
        """Called with the rewards of a task's chains after each step."""

    def state_dict(self) -> dict[str, Any]:
        """JSON values that a checkpoint keeps."""
        return {"position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.position = state["position"]

    def task_at(self, position: int) -> Task:
        """The task at a position of the stream."""
        epoch, index = divmod(position, len(self._tasks))
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = np.random.default_rng((self._seed, epoch)).permutation(len(self._tasks))
        return self._tasks[int(self._order[index])]


class DifficultySampler(TaskSampler):
    """Draws tasks with a probability proportional to p · (1 − p), the variance of a success of probability p.

    p is a running estimate per task, the mean of its rewards clipped to 0 to 1, of which older steps count less. A task
    without chains has p = 1/2: it is drawn before those that all chains solve, or none.
    """

    DECAY = 0.5
    """Weight of the chains before in the estimate, per step that draws the task."""

    def __init__(self, tasks: Sequence[Task], seed: int) -> None:
        super().__init__(tasks, seed)
        self._index = {id(task): index for index, task in enumerate(tasks)}
        self._successes = np.ones(len(tasks))  # with one success and one failure as the prior
        self._failures = np.ones(len(tasks))

    def take(self, count: int) -> list[Task]:
        """Draw `count` tasks, distinct if there are as many."""
        rng = np.random.default_rng((self._seed, self.position))
        self.position += count
        success = self._successes / (self._successes + self._failures)
        chosen: list[int] = []
        while len(chosen) < count:
            # The largest of log w + Gumbel noise are a sample without replacement with probabilities w.
            keys = np.log(success * (1 - success)) + rng.gumbel(size=len(success))
            chosen += np.argsort(-keys)[: count - len(chosen)].tolist()
        return [self._tasks[index] for index in chosen]

    def observe(self, task: Task, rewards: Sequence[float]) -> None:
        index = self._index[id(task)]
        clipped = np.clip(rewards, 0, 1)
        self._successes[index] = 1 + self.DECAY * (self._successes[index] - 1) + clipped.sum()
        self._failures[index] = 1 + self.DECAY * (self._failures[index] - 1) + (1 - clipped).sum()

    def state_dict(self) -> dict[str, Any]:
        counts = np.stack([self._successes, self._failures], 1)
        observed = np.flatnonzero((counts != 1).any(1)).tolist()
        return {**super().state_dict(), "counts": {str(index): counts[index].tolist() for index in observed}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        for index, (successes, failures) in state["counts"].items():
            self._successes[int(index)] = successes
            self._failures[int(index)] = failures
