"""Generated games of all six task types, drawn from a seed. `rooms.toml` has the vocabulary.

Every game is winnable: an expert that knows where everything is wins it before it is returned. The split of a game is a
hash of its content, so no game is in two splits, whatever the seeds.
"""

from __future__ import annotations

import functools
import json
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from random import Random
from typing import Any

from agentfly.environments.alfworld.expert import next_command
from agentfly.environments.alfworld.game import APPLIANCES, ALFWorldGame, ALFWorldGoal, Receptacle, TaskType, Thing
from agentfly.environments.alfworld.household import Household
from agentfly.environments.alfworld.official import make_row
from agentfly.environments.alfworld.pddl import make_identifier
from agentfly.environments.task_sampling import sample_tasks
from agentfly.errors import ConfigError

MAX_STEPS = 40


@dataclass(frozen=True, slots=True)
class RoomType:
    """What a generated room contains."""

    receptacles: Mapping[str, Sequence[int]]
    """By type: the minimum and maximum number."""
    things: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RoomVocabulary:
    """The contents of `rooms.toml`, with the groups of types written out."""

    rooms: Mapping[str, RoomType]
    openable: frozenset[str]
    lamps: frozenset[str]
    traits: Mapping[str, frozenset[str]]
    """By type of thing: its initial traits."""
    fits: Mapping[str, frozenset[str]]
    """By receptacle type: the types of things that may be put there."""
    instructions: Mapping[str, Sequence[str]]
    """By task type: templates of the task with `{thing}` and `{target}`."""


@functools.cache
def load_vocabulary() -> RoomVocabulary:
    """Read `rooms.toml`."""
    table = tomllib.loads(resources.files(__package__).joinpath("rooms.toml").read_text("utf-8"))
    groups: dict[str, list[str]] = {}

    def expand(types: str) -> list[str]:
        return [name for word in types.split() for name in groups.get(word, [word])]

    for group, types in table["groups"].items():
        groups[group] = expand(types)
    rooms = {
        name: RoomType(room["receptacles"], tuple(expand(room["things"]))) for name, room in table["rooms"].items()
    }
    with_trait = {trait: expand(types) for trait, types in table["traits"].items()}
    with_trait["pickupable"] = [
        type_ for room in rooms.values() for type_ in room.things if type_ not in table["fixed"].split()
    ]
    return RoomVocabulary(
        rooms=rooms,
        openable=frozenset(expand(table["openable"])),
        lamps=frozenset(expand(table["lamps"])),
        traits={
            type_: frozenset(trait for trait, types in with_trait.items() if type_ in types)
            for room in rooms.values()
            for type_ in room.things
        },
        fits={name: frozenset(expand(types)) for name, types in table["fits"].items()},
        instructions=table["instructions"],
    )


def draw_tasks(
    split: str, count: int, seed: int, *, kinds: Sequence[str] | None, rooms: Sequence[str] | None
) -> list[dict[str, Any]]:
    """`count` tasks of a split: rows with `id`, `question`, `kind` and `game`."""
    known = load_vocabulary().rooms
    if unknown := [room for room in rooms or () if room not in known]:
        raise ConfigError(f"there is no room {unknown[0]!r:.40}; there are {', '.join(known)}")
    room_types = [known[room] for room in rooms or known]
    possible = [kind for kind in TaskType if any(_draw_goal(Random(0), room, kind) for room in room_types)]
    try:
        chosen = [TaskType(kind) for kind in kinds] if kinds else possible
    except ValueError as error:
        raise ConfigError(f"{error}; there are {', '.join(kind.value for kind in TaskType)}") from None
    if wrong := [kind.value for kind in chosen if kind not in possible]:
        raise ConfigError(f"{wrong[0]} cannot be done in {' or '.join(rooms or known)}; give other rooms or kinds")

    def draw(random: Random, number: int) -> tuple[str, dict[str, Any]]:
        game = draw_game(random, chosen[number % len(chosen)], room_types)
        return content_key(game), make_row(game)

    return sample_tasks("alfworld", split, count, seed, draw)


def content_key(game: ALFWorldGame) -> str:
    """Identifies household and goal, independent of the wording of the task."""
    return json.dumps({**game.to_json(), "task": ""}, sort_keys=True)


def draw_game(random: Random, kind: TaskType, rooms: Sequence[RoomType]) -> ALFWorldGame:
    """A game of a task type in one of the rooms; draws that are won at the start or not winnable are rejected."""
    while True:
        room = random.choice(rooms)
        goal = _draw_goal(random, room, kind)
        game = goal and _furnish(random, room, goal)
        if not game:
            continue
        house = Household(game)
        if house.won:
            continue
        for _ in range(MAX_STEPS):
            command = next_command(house, explores=False)
            if command is None:
                break
            house.step(command)
        if house.won:
            return game


def _draw_goal(random: Random, room: RoomType, kind: TaskType) -> ALFWorldGoal | None:
    """A goal that is possible in the room; None if the task type is impossible there."""
    vocabulary = load_vocabulary()
    if kind is TaskType.LOOK:
        lamps = [thing for thing in room.things if thing in vocabulary.lamps]
        things = [thing for thing in room.things if "pickupable" in vocabulary.traits[thing]]
        return ALFWorldGoal(kind, random.choice(things), random.choice(lamps)) if lamps else None
    trait = kind.needs[0] if kind.needs else "pickupable"
    if kind.needs and not any(most for type_, (_, most) in room.receptacles.items() if type_ in APPLIANCES[trait]):
        return None
    things = [thing for thing in room.things if {trait, "pickupable"} <= vocabulary.traits[thing]]
    pairs = [(thing, target) for thing in things for target in room.receptacles if thing in vocabulary.fits[target]]
    return ALFWorldGoal(kind, *random.choice(pairs)) if pairs else None


def _furnish(random: Random, room: RoomType, goal: ALFWorldGoal) -> ALFWorldGame | None:
    """Draw the receptacles and things of a game with this goal; None if a thing fits nowhere."""
    vocabulary = load_vocabulary()
    receptacle_types: list[str] = []
    for type_, (fewest, most) in room.receptacles.items():
        receptacle_types += [type_] * max(random.randint(fewest, most), int(type_ == goal.target))
    receptacles: list[Receptacle] = []
    for name, type_ in _name_entities(receptacle_types):
        # A fifth of the receptacles share the location of the previous one of their type.
        shares_place = receptacles and receptacles[-1].type == type_ and random.random() < 0.2
        place = receptacles[-1].at if shares_place else len(receptacles) + 1
        receptacles.append(Receptacle(name, type_, place, openable=type_ in vocabulary.openable))

    thing_types = [goal.thing] * (2 if goal.kind is TaskType.PLACE_TWO else 1)
    thing_types += [goal.target] * (goal.kind is TaskType.LOOK)
    thing_types += random.choices(room.things, k=random.randint(8, 20))
    things: list[Thing] = []
    for name, type_ in _name_entities(thing_types):
        fitting = [each for each in receptacles if type_ in vocabulary.fits[each.type]]
        if goal.kind.needs is None and type_ == goal.thing:  # things to be moved must not be at the target already
            fitting = [each for each in fitting if each.type != goal.target]
        if not fitting:
            return None
        receptacle = random.choice(fitting)
        assert receptacle.at is not None
        traits = vocabulary.traits[type_]
        things.append(Thing(name, type_, (receptacle.name,), at=(receptacle.at,), traits=traits))
    instruction = random.choice(vocabulary.instructions[goal.kind.value])
    return ALFWorldGame(
        task=instruction.format(thing=goal.thing.lower(), target=goal.target.lower()),
        goal=goal,
        start=0,
        receptacles=tuple(receptacles),
        things=tuple(things),
        fits={each.type: vocabulary.fits[each.type] for each in receptacles},
    )


def _name_entities(types: Sequence[str]) -> list[tuple[str, str]]:
    """Player-visible names with their types, in the order of the official games, counted down within each type:
    `drawer 2`, `drawer 1`."""
    left = Counter(types)
    names = []
    for type_ in sorted(types, key=lambda each: make_identifier(f"{each.lower()} 0", 0)):
        names.append((f"{type_.lower()} {left[type_]}", type_))
        left[type_] -= 1
    return names
