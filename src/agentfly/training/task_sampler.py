"""The order of training tasks: each epoch is its own permutation, determined by the seed.

The state of a sampler is one number, so a resumed run continues with the next task.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agentfly.errors import ConfigError
from agentfly.types import Task


class TaskSampler:
    """An endless stream of tasks."""

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
        out = []
        for _ in range(count):
            epoch, index = divmod(self.position, len(self._tasks))
            if epoch != self._epoch:
                self._epoch = epoch
                self._order = np.random.default_rng((self._seed, epoch)).permutation(len(self._tasks))
            self.position += 1
            out.append(self._tasks[int(self._order[index])])
        return out
