"""A frozen lake: walk over the ice to the goal, and into no hole.

Rules are Gymnasium's; but start and goal may be anywhere, so that nobody gets there who does not look. On a slippery
lake a step goes astray two times out of three, to the left or the right of where it was meant to go; a task's slips are
drawn from its own seed, so the same moves lead to the same end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from random import Random
from typing import Any

from agentfly.environments.drawing import drawn
from agentfly.environments.games.game import Game
from agentfly.environments.games.grid import WAYS, Direction, Place, beside, checked_rows, places_of
from agentfly.errors import ConfigError, DataError
from agentfly.tooling import tool
from agentfly.types import Task, ToolCall

PLAYER, START, ICE, HOLE, GOAL = "P", "S", "F", "H", "G"
QUESTION = "Cross the frozen lake: P is you, G the goal, H a hole, F and S are ice.{slippery}\n{lake}"
SLIPPERY = " It is slippery: two steps of three go astray to the side."
_ASTRAY: dict[Direction, tuple[Direction, Direction]] = {
    "up": ("left", "right"), "down": ("left", "right"), "left": ("up", "down"), "right": ("up", "down"),
}  # fmt: skip


class FrozenLake(Game):
    """A frozen lake as a grid of letters: reach the goal, step into no hole."""

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
        """Lakes of `size` rows and columns with a share of `holes`; from every start there is a way to the goal."""
        if not 3 <= size <= 16 or not 0 <= holes <= 0.6:
            raise ConfigError(f"a lake has a size from 3 to 16 and 0 to 0.6 holes, not size={size!r}, holes={holes!r}")

        def draw(random: Random, _: int) -> tuple[str, dict[str, Any]] | None:
            rows = _draw_lake(random, size, holes)
            if rows is None:
                return None
            question = QUESTION.format(lake=shown(rows), slippery=SLIPPERY if slippery else "")
            slips = {"slippery": True, "seed": random.randrange(2**32)} if slippery else {}
            return "\n".join(rows), {"question": question, "lake": rows, **slips}

        return drawn("frozen_lake", split, count, seed, draw)

    async def reset(self, task: Task) -> None:
        """Stand at the start of the lake in the column `lake`; `slippery` and `seed` say whether and how one slips."""
        self.begin()
        self._rows = lake_of(task)
        (self._at,) = places_of(START, self._rows)
        self._slippery = bool(task.columns.get("slippery", False))
        self._slips = Random(str(task.columns.get("seed", 0)))
        self._worth: dict[Place, float] | None = None

    @tool
    async def move(self, direction: Direction) -> dict[str, Any]:
        """Take one step on the ice. Shows the lake after it.

        Args:
            direction: Where to go.
        """
        return await self.played(self._step, direction)

    async def _step(self, direction: Direction) -> str:
        went = self._slips.choice((direction, *_ASTRAY[direction])) if self._slippery else direction
        there = beside(self._at, went)
        self._at = there if symbol_at(self._rows, there) else self._at
        under = symbol_at(self._rows, self._at)
        self.won = under == GOAL
        self.over = under in (GOAL, HOLE)
        self.score = float(self.won)
        ending = {GOAL: "\nYou are at the goal.", HOLE: "\nYou fell into a hole."}.get(under, "")
        return shown(self._rows, self._at) + ending

    def expert(self) -> ToolCall | str:
        """The shortest way; on a slippery lake, the move that is likeliest to lead there in the end."""
        if self.over:
            return "Done."
        if self._worth is None:
            self._worth = worth(self._rows, self._slippery)
        values = self._worth
        best = max(WAYS, key=lambda way: _expected(self._rows, values, self._at, way, self._slippery))
        return ToolCall("move", {"direction": best})


def lake_of(task: Task) -> list[str]:
    """The lake of a task, checked."""
    if "lake" not in task.columns:
        raise DataError(f"task {task.id!r} has no column 'lake'; FrozenLake.draw_tasks makes such rows")
    rows = checked_rows(task.columns["lake"], START + ICE + HOLE + GOAL, "lake")
    if len(places_of(START, rows)) != 1 or not places_of(GOAL, rows):
        raise DataError(f"the lake of task {task.id!r} needs one start (S) and a goal (G)")
    return rows


def shown(rows: Sequence[str], player: Place | None = None) -> str:
    """The lake as the model reads it; None: the player is at the start."""
    y, x = player or places_of(START, rows)[0]
    return "\n".join(row[:x] + PLAYER + row[x + 1 :] if number == y else row for number, row in enumerate(rows))


def symbol_at(rows: Sequence[str], place: Place) -> str:
    """What is there; empty where there is no lake."""
    y, x = place
    return rows[y][x] if 0 <= y < len(rows) and 0 <= x < len(rows[y]) else ""


def distances(rows: Sequence[str]) -> dict[Place, int]:
    """Steps to the goal, from every place that has a way to it."""
    found = dict.fromkeys(places_of(GOAL, rows), 0)
    queue = deque(found)
    while queue:
        place = queue.popleft()
        for way in WAYS:
            there = beside(place, way)
            if symbol_at(rows, there) in (START, ICE) and there not in found:
                found[there] = found[place] + 1
                queue.append(there)
    return found


def worth(rows: Sequence[str], slippery: bool, sweeps: int = 100, discount: float = 0.99) -> dict[Place, float]:
    """How likely each place is to lead to the goal, sooner rather than later."""
    values = {place: discount**steps for place, steps in distances(rows).items()}
    walked = [place for place in values if symbol_at(rows, place) != GOAL]
    for _ in range(sweeps if slippery else 0):
        for place in walked:
            values[place] = discount * max(_expected(rows, values, place, way, True) for way in WAYS)
    return values


def _expected(rows: Sequence[str], values: dict[Place, float], place: Place, way: Direction, slippery: bool) -> float:
    """What a step is worth on average."""
    ways = (way, *_ASTRAY[way]) if slippery else (way,)
    ends = ((there if symbol_at(rows, there) else place) for there in (beside(place, each) for each in ways))
    return sum(values.get(end, 0.0) for end in ends) / len(ways)


def _draw_lake(random: Random, size: int, holes: float) -> list[str] | None:
    """A lake in which the goal is at least `size` - 1 steps away; None where it came out otherwise."""
    start, goal = random.sample([(y, x) for y in range(size) for x in range(size)], 2)
    marks = {start: START, goal: GOAL}

    def symbol(place: Place) -> str:
        return marks.get(place) or (HOLE if random.random() < holes else ICE)

    rows = ["".join(symbol((y, x)) for x in range(size)) for y in range(size)]
    return rows if distances(rows).get(start, 0) >= size - 1 else None
