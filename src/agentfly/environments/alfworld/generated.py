"""Households without end: games of all six kinds, drawn by a seed.

Every game can be won: the expert, who knows where everything is, wins it before it is given out. Which split a game
belongs to is decided by what is in it, so whatever the seeds, no game is in two.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random
from typing import Any

from agentfly.environments.alfworld.expert import next_command
from agentfly.environments.alfworld.game import APPLIANCES, Game, Goal, Kind, Receptacle, Thing, numbered
from agentfly.environments.alfworld.household import Household
from agentfly.environments.alfworld.official import task_row
from agentfly.environments.alfworld.pddl_writing import identifier
from agentfly.environments.alfworld.rooms import FITS, LAMPS, OPENABLE, ROOMS, Room, traits_of
from agentfly.environments.drawing import drawn
from agentfly.errors import ConfigError

MOST_STEPS = 40
_WORDS = {
    Kind.PLACE: ("put a {thing} in {target}.", "put some {thing} on {target}."),
    Kind.LOOK: ("look at {thing} under the {target}.", "examine the {thing} with the {target}."),
    Kind.CLEAN: ("put a clean {thing} in {target}.", "clean some {thing} and put it in {target}."),
    Kind.HEAT: ("put a hot {thing} in {target}.", "heat some {thing} and put it in {target}."),
    Kind.COOL: ("put a cool {thing} in {target}.", "cool some {thing} and put it in {target}."),
    Kind.PLACE_TWO: ("put two {thing} in {target}.", "find two {thing} and put them in {target}."),
}


def draw_tasks(
    split: str, count: int, seed: int, kinds: Sequence[str] | None, rooms: Sequence[str] | None
) -> list[dict[str, Any]]:
    """So many tasks of a split: rows with `id`, `question`, `kind` and `game`."""
    if unknown := [room for room in rooms or () if room not in ROOMS]:
        raise ConfigError(f"there is no room {unknown[0]!r:.40}; there are {', '.join(ROOMS)}")
    there = [ROOMS[room] for room in rooms or ROOMS]
    possible = [kind for kind in Kind if any(_draw_goal(Random(0), room, kind) for room in there)]
    try:
        chosen = [Kind(kind) for kind in kinds] if kinds else possible
    except ValueError as error:
        raise ConfigError(f"{error}; there are {', '.join(kind.value for kind in Kind)}") from None
    if wrong := [kind.value for kind in chosen if kind not in possible]:
        raise ConfigError(f"{wrong[0]} cannot be done in {' or '.join(rooms or ROOMS)}; give other rooms or kinds")

    def draw(random: Random, number: int) -> tuple[str, dict[str, Any]]:
        game = draw_game(random, chosen[number % len(chosen)], there)
        return essence(game), task_row(game)

    return drawn("alfworld", split, count, seed, draw)


def essence(game: Game) -> str:
    """What only the same household with the same goal has, in whatever words the task is put."""
    return json.dumps({**game.to_json(), "task": ""}, sort_keys=True)


def draw_game(random: Random, kind: Kind, rooms: Sequence[Room]) -> Game:
    """A game of a kind in one of the rooms. What turns out to be won already, or not to be winnable, is drawn anew."""
    while True:
        room = random.choice(rooms)
        goal = _draw_goal(random, room, kind)
        if goal is None:
            continue
        receptacles = _furnish(random, room, goal)
        game = _fill(random, room, goal, receptacles)
        if game is not None and _winnable(game):
            return game


def _draw_goal(random: Random, room: Room, kind: Kind) -> Goal | None:
    """Something that can be asked for in such a room; None where nothing of the kind can."""
    if kind is Kind.LOOK:
        lamps = [thing for thing in room.things if thing in LAMPS]
        things = [thing for thing in room.things if "pickupable" in traits_of(thing)]
        return Goal(kind, random.choice(things), random.choice(lamps)) if lamps else None
    trait = kind.needs[0] if kind.needs else "pickupable"
    if kind.needs and not any(most for type_, (_, most) in room.receptacles.items() if type_ in APPLIANCES[trait]):
        return None
    things = [thing for thing in room.things if {trait, "pickupable"} <= traits_of(thing)]
    pairs = [(thing, target) for thing in things for target in room.receptacles if thing in FITS[target]]
    return Goal(kind, *random.choice(pairs)) if pairs else None


def _furnish(random: Random, room: Room, goal: Goal) -> list[Receptacle]:
    types: list[str] = []
    for type_, (fewest, most) in room.receptacles.items():
        types += [type_] * max(random.randint(fewest, most), int(type_ == goal.target))
    types.sort(key=_listed_as)
    receptacles: list[Receptacle] = []
    for name, type_ in zip(numbered(types), types, strict=True):
        neighbour = receptacles and receptacles[-1].type == type_ and random.random() < 0.2
        place = receptacles[-1].at if neighbour else len(receptacles) + 1
        receptacles.append(Receptacle(name, type_, place, type_ in OPENABLE))
    return receptacles


def _fill(random: Random, room: Room, goal: Goal, receptacles: Sequence[Receptacle]) -> Game | None:
    asked = [goal.thing] * (2 if goal.kind is Kind.PLACE_TWO else 1) + [goal.target] * (goal.kind is Kind.LOOK)
    types = sorted(asked + random.choices(room.things, k=random.randint(8, 20)), key=_listed_as)
    things = []
    for name, type_ in zip(numbered(types), types, strict=True):
        fitting = [each for each in receptacles if type_ in FITS[each.type]]
        if goal.kind.needs is None and type_ == goal.thing:  # what is to be moved there is not there yet
            fitting = [each for each in fitting if each.type != goal.target]
        if not fitting:
            return None
        there = random.choice(fitting)
        assert there.at is not None
        things.append(Thing(name, type_, (there.name,), (there.at,), traits_of(type_)))
    fits = {each.type: FITS[each.type] for each in receptacles}
    words = random.choice(_WORDS[goal.kind]).format(thing=goal.thing.lower(), target=goal.target.lower())
    return Game(words, goal, 0, tuple(receptacles), tuple(things), fits)


def _listed_as(type: str) -> str:
    """What decides the order of listing, here as in the official games."""
    return identifier(f"{type.lower()} 0", 0)


def _winnable(game: Game) -> bool:
    house = Household(game)
    if house.won:
        return False
    for _ in range(MOST_STEPS):
        command = next_command(house, explores=False)
        if command is None:
            break
        house.step(command)
    return house.won
