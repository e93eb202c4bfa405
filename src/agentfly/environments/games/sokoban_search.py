"""How a level of Sokoban is solved, and how one is drawn that can be.

A level is drawn by playing backwards: from the boxes on their goals, all that can lead there is searched breadth first.
So whatever is drawn can be solved, and how many moves it takes at least is known.
"""

from __future__ import annotations

from collections import deque
from random import Random

from agentfly.environments.games.grid import WAYS, Direction, Place, beside
from agentfly.environments.games.sokoban_level import Position, Room

MOST_POSITIONS = 300_000
"""Positions that are searched for a solution before it is given up."""


class TooLarge(Exception):
    """No solution was found among as many positions as are searched."""


def solution(room: Room, start: Position) -> dict[Position, Direction] | None:
    """What to do in each position on a shortest way to the end; None where there is no way."""
    came: dict[Position, tuple[Position, Direction] | None] = {start: None}
    queue = deque([start])
    while queue:
        position = queue.popleft()
        if room.solved(position):
            return _way(came, position)
        for direction in WAYS:
            after = room.moved(position, direction)
            if after is None or after in came or any(map(room.stuck, after.boxes - position.boxes)):
                continue
            came[after] = position, direction
            queue.append(after)
        if len(came) > MOST_POSITIONS:
            raise TooLarge
    return None


def _way(came: dict[Position, tuple[Position, Direction] | None], end: Position) -> dict[Position, Direction]:
    way: dict[Position, Direction] = {}
    step = came[end]
    while step is not None:
        position, direction = step
        way[position] = direction
        step = came[position]
    return way


def draw_level(random: Random, size: int, boxes: int, shortest: int, longest: int) -> tuple[Room, Position] | None:
    """A level that takes so many moves at least and at most; None where the room that was drawn has none."""
    room = _draw_room(random, size, boxes)
    if room is None:
        return None
    far = [
        [position for position in layer if not position.boxes & room.goals]
        for layer in _layers(room, longest)[shortest:]
    ]
    far = [layer for layer in far if layer]
    return (room, random.choice(random.choice(far))) if far else None


def _layers(room: Room, longest: int) -> list[list[Position]]:
    """Positions by the number of moves that are missing, at least, to the end."""
    layers = [[Position(player, room.goals) for player in sorted(room.floor - room.goals)]]
    seen = set(layers[0])
    while layers[-1] and len(layers) <= longest:
        layer = []
        for position in layers[-1]:
            for earlier in room.before(position):
                if earlier not in seen:
                    seen.add(earlier)
                    layer.append(earlier)
        layers.append(layer)
        if len(seen) > MOST_POSITIONS // 10:
            break
    return layers


def _draw_room(random: Random, size: int, boxes: int) -> Room | None:
    """A square room with some walls inside; None where they cut it apart."""
    inside = [(y, x) for y in range(1, size - 1) for x in range(1, size - 1)]
    walls = set(random.sample(inside, random.randint(0, len(inside) // 5)))
    free = [place for place in inside if place not in walls]
    goals = frozenset(random.sample(free, boxes))
    return Room(size, size, frozenset(free), goals) if _connected(free) else None


def _connected(places: list[Place]) -> bool:
    left, queue = set(places[1:]), [places[0]]
    while queue:
        place = queue.pop()
        for way in WAYS:
            there = beside(place, way)
            if there in left:
                left.remove(there)
                queue.append(there)
    return not left
