"""A warehouse as Sokoban has it: what stays where it is, what moves, and what one step does, forwards and backwards.

Levels are written in the usual signs: `#` wall, `@` player, `$` box, `.` goal, `*` a box and `+` the player on a goal,
and a space (or `-` or `_`) for the floor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from agentfly.environments.games.grid import WAYS, Direction, Place, beside, places_of
from agentfly.errors import DataError

SIGNS = "#@+$*. "
"""Wall, player, player on a goal, box, box on a goal, goal, floor: the order in which other signs are given too."""
FLOOR = " -_"
BACK: dict[Direction, Direction] = {"up": "down", "down": "up", "left": "right", "right": "left"}


class Position(NamedTuple):
    """What moves."""

    player: Place
    boxes: frozenset[Place]


@dataclass(frozen=True, slots=True)
class Room:
    """What stays where it is."""

    height: int
    width: int
    floor: frozenset[Place]
    """Where there is no wall."""
    goals: frozenset[Place]

    def moved(self, position: Position, direction: Direction) -> Position | None:
        """The position after a step, which pushes the box that is in the way; None where the way is blocked."""
        player, boxes = position
        there = beside(player, direction)
        if there not in self.floor:
            return None
        if there not in boxes:
            return Position(there, boxes)
        behind = beside(there, direction)
        if behind not in self.floor or behind in boxes:
            return None
        return Position(there, boxes - {there} | {behind})

    def before(self, position: Position) -> Iterator[Position]:
        """Every position from which one step leads to this one: the player walked, or pushed a box."""
        player, boxes = position
        for direction in WAYS:
            came_from, ahead = beside(player, BACK[direction]), beside(player, direction)
            if came_from not in self.floor or came_from in boxes:
                continue
            yield Position(came_from, boxes)
            if ahead in boxes:
                yield Position(came_from, boxes - {ahead} | {player})

    def solved(self, position: Position) -> bool:
        """Whether every box is on a goal."""
        return position.boxes <= self.goals

    def stuck(self, box: Place) -> bool:
        """Whether a box stands in a corner that is no goal, where nobody can push it away from."""
        walls = {way: beside(box, way) not in self.floor for way in WAYS}
        return box not in self.goals and (walls["up"] or walls["down"]) and (walls["left"] or walls["right"])

    def shown(self, position: Position, signs: str = SIGNS) -> str:
        """The level as rows of signs."""
        return "\n".join(
            "".join(signs[self._sign((y, x), position)] for x in range(self.width)) for y in range(self.height)
        )

    def _sign(self, place: Place, position: Position) -> int:
        goal = place in self.goals
        if place not in self.floor:
            return 0
        if place == position.player:
            return 2 if goal else 1
        if place in position.boxes:
            return 4 if goal else 3
        return 5 if goal else 6


def read_level(rows: Sequence[str]) -> tuple[Room, Position]:
    """A level of its rows of signs. Beyond the end of a row there is wall."""
    players, boxes, goals = places_of("@+", rows), places_of("$*", rows), places_of(".*+", rows)
    if len(players) != 1 or not boxes or len(boxes) > len(goals):
        raise DataError(
            "a level of Sokoban has one player, a box or more, and a goal for each: "
            f"not {len(players)}, {len(boxes)} and {len(goals)}"
        )
    floor = frozenset(places_of(FLOOR + "@+$*.", rows))
    room = Room(len(rows), max(map(len, rows)), floor, frozenset(goals))
    return room, Position(players[0], frozenset(boxes))
