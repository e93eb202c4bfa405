"""Which tasks come next: every pass over the data is a permutation of its own, and the seed fixes them all.

Where a feed stands is one number, so a run that is resumed goes on with the very task it was about to see.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agentfly.errors import ConfigError
from agentfly.types import Task


class Feed:
    """Tasks without end."""

    def __init__(self, tasks: Sequence[Task], seed: int, position: int = 0) -> None:
        if not tasks:
            raise ConfigError("there is nothing to train on: no tasks were given")
        self._tasks, self._seed = tasks, seed
        self.position = position
        """How many tasks were handed out."""
        self._pass, self._order = -1, np.empty(0, np.int64)

    def take(self, count: int) -> list[Task]:
        """The next so many tasks."""
        return [self._next() for _ in range(count)]

    def _next(self) -> Task:
        number, place = divmod(self.position, len(self._tasks))
        if number != self._pass:
            self._pass = number
            self._order = np.random.default_rng((self._seed, number)).permutation(len(self._tasks))
        self.position += 1
        return self._tasks[int(self._order[place])]
