"""Frozen lake: cross the ice to the goal without falling into a hole.

The rules are Gymnasium's, but start and goal may be anywhere, so a policy that ignores the observation rarely succeeds.
On a slippery lake two of three steps go to the left or right of the intended direction. The slips are drawn from the
task's own seed, so the same moves always have the same result.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from random import Random
from typing import Any, ClassVar

from agentfly.environments.data import get_column, sample_tasks
from agentfly.environments.games.game import (
    OFFSETS,
    Direction,
    GameEnvironment,
    Place,
    find_symbols,
    neighbor,
    validate_rows,
)
from agentfly.errors import ConfigError, DataError
from agentfly.tooling import tool
from agentfly.types import Task, ToolCall

PLAYER, START, ICE, HOLE, GOAL = "P", "S", "F", "H", "G"
SLIPPERY = " It is slippery: two steps of three go astray to the side."
_SLIP_DIRECTIONS: dict[Direction, tuple[Direction, Direction]] = {
    "up": ("left", "right"), "down": ("left", "right"), "left": ("up", "down"), "right": ("up", "down"),
}  # fmt: skip


class FrozenLake(GameEnvironment):
    """A frozen lake as a grid of letters: reach the goal, avoid the holes. A subclass may show it in other ways."""

    question: ClassVar[str] = (
        "Cross the frozen lake: P is you, G the goal, H a hole, F and S are ice.{slippery}\n{lake}"
    )
    """The task: `{lake}` is the first observation, `{slippery}` a sentence on a slippery lake."""

    @classmethod
    def render(cls, rows: Sequence[str], player: Place) -> str:
        """The observation: the lake with the player on it."""
        y, x = player
        return "\n".join(row[:x] + PLAYER + row[x + 1 :] if number == y else row for number, row in enumerate(rows))

    @classmethod
    def draw_tasks(
        cls,
        split: str = "train",
        count: int = 100,
        *,
        seed: int = 0,
        size: int = 4,
        holes: float = 0.25,
        slippery: bool = False,
    ) -> list[dict[str, Any]]:
        """Lakes of `size` rows and columns with a fraction of `holes`; the goal is at least `size` - 1 steps away."""
        if not 3 <= size <= 16 or not 0 <= holes <= 0.6:
            raise ConfigError(
                f"a lake has a size from 3 to 16 and a fraction of 0 to 0.6 holes, not size={size!r}, holes={holes!r}"
            )

        def draw(random: Random, _: int) -> tuple[str, dict[str, Any]] | None:
            start, goal = random.sample([(y, x) for y in range(size) for x in range(size)], 2)
            rows = [""] * size
            for y in range(size):
                for x in range(size):
                    mark = START if (y, x) == start else GOAL if (y, x) == goal else ""
                    rows[y] += mark or (HOLE if random.random() < holes else ICE)
            if compute_distances(rows).get(start, 0) < size - 1:
                return None
            question = cls.question.format(lake=cls.render(rows, start), slippery=SLIPPERY if slippery else "")
            slips = {"slippery": True, "seed": random.randrange(2**32)} if slippery else {}
            return "\n".join(rows), {"question": question, "lake": rows, **slips}

        return sample_tasks("frozen_lake", split, count, seed, draw)

    async def reset(self, task: Task) -> None:
        """Start on the lake in the column `lake`; the columns `slippery` and `seed` determine the slips."""
        self.begin()
        lake = get_column(task, "lake", "FrozenLake.draw_tasks makes such rows")
        self._rows = validate_rows(lake, START + ICE + HOLE + GOAL, "lake")
        if len(find_symbols(START, self._rows)) != 1 or not find_symbols(GOAL, self._rows):
            raise DataError(f"the lake of task {task.id!r} needs one start (S) and a goal (G)")
        (self._at,) = find_symbols(START, self._rows)
        self._slippery = bool(task.columns.get("slippery", False))
        self._slips = Random(str(task.columns.get("seed", 0)))
        self._values: dict[Place, float] | None = None
        """State values for the expert, computed on first use."""

    @tool
    async def move(self, direction: Direction) -> dict[str, Any]:
        """Take one step on the ice. Shows the lake after it.

        Args:
            direction: Where to go.
        """
        return await self.play(direction)

    async def _act(self, direction: Direction) -> str:
        actual = self._slips.choice((direction, *_SLIP_DIRECTIONS[direction])) if self._slippery else direction
        target = neighbor(self._at, actual)
        self._at = target if symbol_at(self._rows, target) else self._at
        under = symbol_at(self._rows, self._at)
        self.won = under == GOAL
        self.over = under in (GOAL, HOLE)
        self.score = float(self.won)
        ending = {GOAL: "\nYou are at the goal.", HOLE: "\nYou fell into a hole."}.get(under, "")
        return self.render(self._rows, self._at) + ending

    def expert(self) -> ToolCall | str:
        """The next step of a shortest path; on a slippery lake, the greedy action of value iteration."""
        if self.over:
            return "Done."
        if self._values is None:
            self._values = compute_values(self._rows, self._slippery)
        values = self._values
        best = max(
            OFFSETS, key=lambda way: _action_value(self._rows, values, self._at, direction=way, slippery=self._slippery)
        )
        return ToolCall("move", {"direction": best})


def symbol_at(rows: Sequence[str], cell: Place) -> str:
    """The symbol at a place. Empty outside the lake."""
    y, x = cell
    return rows[y][x] if 0 <= y < len(rows) and 0 <= x < len(rows[y]) else ""


def compute_distances(rows: Sequence[str]) -> dict[Place, int]:
    """Number of steps to the goal from every place with a path to it (breadth-first search)."""
    distances = dict.fromkeys(find_symbols(GOAL, rows), 0)
    queue = deque(distances)
    while queue:
        cell = queue.popleft()
        for direction in OFFSETS:
            target = neighbor(cell, direction)
            if symbol_at(rows, target) in (START, ICE) and target not in distances:
                distances[target] = distances[cell] + 1
                queue.append(target)
    return distances


def compute_values(rows: Sequence[str], slippery: bool) -> dict[Place, float]:
    """State values with discount 0.99: exact without slips, else 100 sweeps of value iteration."""
    discount, sweeps = 0.99, 100
    values = {cell: discount**steps for cell, steps in compute_distances(rows).items()}
    inner = [cell for cell in values if symbol_at(rows, cell) != GOAL]
    for _ in range(sweeps if slippery else 0):
        for cell in inner:
            values[cell] = discount * max(
                _action_value(rows, values, cell, direction=way, slippery=True) for way in OFFSETS
            )
    return values


def _action_value(
    rows: Sequence[str], values: dict[Place, float], cell: Place, *, direction: Direction, slippery: bool
) -> float:
    """Expected value of the place after a step."""
    directions = (direction, *_SLIP_DIRECTIONS[direction]) if slippery else (direction,)
    nexts = [neighbor(cell, way) for way in directions]
    return sum(values.get(target if symbol_at(rows, target) else cell, 0.0) for target in nexts) / len(directions)
