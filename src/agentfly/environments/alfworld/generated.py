"""Generated games of all six task types, drawn from a seed.

Every game is winnable: an expert that knows where everything is wins it before it is returned. The split of a game is a
hash of its content, so no game is in two splits, whatever the seeds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from agentfly.environments.alfworld.expert import next_command
from agentfly.environments.alfworld.game import (
    APPLIANCES,
    ALFWorldGame,
    ALFWorldGoal,
    Receptacle,
    TaskType,
    Thing,
    number_names,
)
from agentfly.environments.alfworld.household import Household
from agentfly.environments.alfworld.official import make_row
from agentfly.environments.alfworld.pddl import make_identifier
from agentfly.environments.task_sampling import sample_tasks
from agentfly.errors import ConfigError

MAX_STEPS = 40
_INSTRUCTIONS = {
    TaskType.PLACE: ("put a {thing} in {target}.", "put some {thing} on {target}."),
    TaskType.LOOK: ("look at {thing} under the {target}.", "examine the {thing} with the {target}."),
    TaskType.CLEAN: ("put a clean {thing} in {target}.", "clean some {thing} and put it in {target}."),
    TaskType.HEAT: ("put a hot {thing} in {target}.", "heat some {thing} and put it in {target}."),
    TaskType.COOL: ("put a cool {thing} in {target}.", "cool some {thing} and put it in {target}."),
    TaskType.PLACE_TWO: ("put two {thing} in {target}.", "find two {thing} and put them in {target}."),
}
OPENABLE = frozenset({"Cabinet", "Drawer", "Fridge", "Microwave", "Safe"})

_TRAITS = {
    "cleanable": "Apple Bowl ButterKnife Cloth Cup DishSponge Egg Fork Kettle Knife Ladle Lettuce Mug Pan Plate Pot "
    "Potato SoapBar Spatula Spoon Tomato",
    "heatable": "Apple Bread Cup Egg Mug Plate Potato Tomato",
    "coolable": "Apple Bowl Bread Cup Egg Lettuce Mug Pan Plate Pot Potato Tomato WineBottle",
    "sliceable": "Apple Bread Lettuce Potato Tomato",
    "toggleable": "DeskLamp FloorLamp",
    "isReceptacleObject": "Bowl Box Cup Mug Pan Plate Pot",
}
_FIXED = frozenset({"DeskLamp", "FloorLamp", "HousePlant", "Television"})
"""Types that cannot be picked up."""
LAMPS = frozenset({"DeskLamp", "FloorLamp"})

_SMALL = "CD CellPhone CreditCard KeyChain Pen Pencil Watch"
_TABLEWARE = "Bowl ButterKnife Cup Fork Knife Mug Plate Spoon"
_FOOD = "Apple Bread Egg Lettuce Potato Tomato"
_SURFACE = (
    f"{_SMALL} {_TABLEWARE} {_FOOD} AlarmClock Book Box Candle Cloth DeskLamp DishSponge HousePlant Kettle Ladle "
    "Laptop Newspaper Pan PepperShaker Pot RemoteControl SaltShaker SoapBar SoapBottle Spatula SprayBottle Statue "
    "TissueBox ToiletPaper Vase WineBottle"
)
_FITS = {
    "ArmChair": "Book Box CellPhone Laptop Newspaper Pillow RemoteControl",
    "BathtubBasin": "Cloth DishSponge SoapBar",
    "Bed": "Book CellPhone Laptop Newspaper Pillow TeddyBear",
    "Cabinet": f"{_TABLEWARE} Candle Cloth Kettle Pan PepperShaker Pot SaltShaker SoapBar SoapBottle SprayBottle "
    "ToiletPaper Vase WineBottle",
    "CoffeeMachine": "Cup Mug",
    "CoffeeTable": _SURFACE,
    "CounterTop": _SURFACE,
    "Desk": _SURFACE,
    "DiningTable": _SURFACE,
    "Drawer": f"{_SMALL} Book ButterKnife Candle Cloth Fork Knife Ladle Newspaper PepperShaker RemoteControl "
    "SaltShaker SoapBar Spatula Spoon TissueBox ToiletPaper",
    "Dresser": f"{_SURFACE} Television",
    "Fridge": f"{_FOOD} Bowl Cup Mug Pan Plate Pot WineBottle",
    "GarbageCan": f"{_FOOD} CD Cloth DishSponge Newspaper Pen Pencil SoapBar SprayBottle TissueBox ToiletPaper",
    "Microwave": "Apple Bowl Bread Cup Egg Mug Plate Potato Tomato",
    "Safe": "CD CellPhone CreditCard KeyChain Statue Watch",
    "Shelf": f"{_SMALL} AlarmClock Book Bowl Box Candle Cup DeskLamp Mug PepperShaker Plate Pot SaltShaker SoapBottle "
    "SprayBottle Statue TissueBox ToiletPaper Vase WineBottle",
    "SideTable": _SURFACE,
    "SinkBasin": f"{_TABLEWARE} {_FOOD} Cloth DishSponge Kettle Ladle Pan Pot SoapBar Spatula",
    "Sofa": "Book Box CellPhone CreditCard KeyChain Laptop Newspaper Pillow RemoteControl",
    "StoveBurner": "Kettle Pan Pot",
    "TVStand": f"{_SMALL} Book Box RemoteControl Statue Television TissueBox Vase",
    "Toilet": "Candle Cloth SoapBar SoapBottle SprayBottle TissueBox ToiletPaper",
}
FITS: Mapping[str, frozenset[str]] = {name: frozenset(things.split()) for name, things in _FITS.items()}
"""By receptacle type: the types of things that may be put there."""


def traits_of(type: str) -> frozenset[str]:
    """The initial traits of a thing of this type."""
    traits = {trait for trait, types in _TRAITS.items() if type in types.split()}
    return frozenset(traits if type in _FIXED else traits | {"pickupable"})


@dataclass(frozen=True, slots=True)
class RoomType:
    """What a generated room contains."""

    receptacles: Mapping[str, tuple[int, int]]
    """By type: the minimum and maximum number."""
    things: tuple[str, ...]


def _room(things: str, **receptacles: tuple[int, int]) -> RoomType:
    return RoomType(receptacles, tuple(things.split()))


ROOMS = {
    "kitchen": _room(
        f"{_TABLEWARE} {_FOOD} DishSponge HousePlant Kettle Ladle Pan PepperShaker Pot SaltShaker SoapBottle Spatula "
        "Vase WineBottle",
        Cabinet=(3, 9), CoffeeMachine=(0, 1), CounterTop=(1, 3), DiningTable=(0, 1), Drawer=(2, 6), Fridge=(1, 1),
        GarbageCan=(1, 1), Microwave=(1, 1), Shelf=(0, 3), SideTable=(0, 1), SinkBasin=(1, 1), StoveBurner=(2, 4),
    ),
    "bedroom": _room(
        f"{_SMALL} AlarmClock Book Bowl Box DeskLamp HousePlant Laptop Mug Pillow Statue TeddyBear TissueBox Vase",
        Bed=(1, 1), Desk=(1, 2), Drawer=(2, 6), Dresser=(0, 1), GarbageCan=(1, 1), Safe=(0, 1), Shelf=(1, 6),
        SideTable=(0, 2), ArmChair=(0, 1),
    ),
    "living room": _room(
        f"{_SMALL} Book Box Candle DeskLamp HousePlant Laptop Newspaper Pillow RemoteControl Statue Television "
        "TissueBox Vase",
        ArmChair=(1, 2), CoffeeTable=(1, 1), Drawer=(1, 4), Dresser=(0, 1), GarbageCan=(1, 1), Shelf=(0, 3),
        SideTable=(1, 2), Sofa=(1, 1), TVStand=(0, 1), Safe=(0, 1),
    ),
    "bathroom": _room(
        "Candle Cloth DishSponge SoapBar SoapBottle SprayBottle TissueBox ToiletPaper",
        BathtubBasin=(0, 1), Cabinet=(1, 4), CounterTop=(1, 1), Drawer=(0, 4), GarbageCan=(1, 1), Shelf=(0, 2),
        SideTable=(0, 1), SinkBasin=(1, 2), Toilet=(1, 1),
    ),
}  # fmt: skip


def draw_tasks(
    split: str, count: int, seed: int, *, kinds: Sequence[str] | None, rooms: Sequence[str] | None
) -> list[dict[str, Any]]:
    """`count` tasks of a split: rows with `id`, `question`, `kind` and `game`."""
    if unknown := [room for room in rooms or () if room not in ROOMS]:
        raise ConfigError(f"there is no room {unknown[0]!r:.40}; there are {', '.join(ROOMS)}")
    room_types = [ROOMS[room] for room in rooms or ROOMS]
    possible = [kind for kind in TaskType if any(_draw_goal(Random(0), room, kind) for room in room_types)]
    try:
        chosen = [TaskType(kind) for kind in kinds] if kinds else possible
    except ValueError as error:
        raise ConfigError(f"{error}; there are {', '.join(kind.value for kind in TaskType)}") from None
    if wrong := [kind.value for kind in chosen if kind not in possible]:
        raise ConfigError(f"{wrong[0]} cannot be done in {' or '.join(rooms or ROOMS)}; give other rooms or kinds")

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
        if goal is None:
            continue
        receptacles = _draw_receptacles(random, room, goal)
        game = _place_things(random, room, goal, receptacles)
        if game is not None and _is_winnable(game):
            return game


def _draw_goal(random: Random, room: RoomType, kind: TaskType) -> ALFWorldGoal | None:
    """A goal that is possible in the room; None if the task type is impossible there."""
    if kind is TaskType.LOOK:
        lamps = [thing for thing in room.things if thing in LAMPS]
        things = [thing for thing in room.things if "pickupable" in traits_of(thing)]
        return ALFWorldGoal(kind, random.choice(things), random.choice(lamps)) if lamps else None
    trait = kind.needs[0] if kind.needs else "pickupable"
    if kind.needs and not any(most for type_, (_, most) in room.receptacles.items() if type_ in APPLIANCES[trait]):
        return None
    things = [thing for thing in room.things if {trait, "pickupable"} <= traits_of(thing)]
    pairs = [(thing, target) for thing in things for target in room.receptacles if thing in FITS[target]]
    return ALFWorldGoal(kind, *random.choice(pairs)) if pairs else None


def _draw_receptacles(random: Random, room: RoomType, goal: ALFWorldGoal) -> list[Receptacle]:
    types: list[str] = []
    for type_, (fewest, most) in room.receptacles.items():
        types += [type_] * max(random.randint(fewest, most), int(type_ == goal.target))
    types.sort(key=_listing_key)
    receptacles: list[Receptacle] = []
    for name, type_ in zip(number_names(types), types, strict=True):
        # A fifth of the receptacles share the location of the previous one of their type.
        shares_place = receptacles and receptacles[-1].type == type_ and random.random() < 0.2
        place = receptacles[-1].at if shares_place else len(receptacles) + 1
        receptacles.append(Receptacle(name, type_, place, openable=type_ in OPENABLE))
    return receptacles


def _place_things(
    random: Random, room: RoomType, goal: ALFWorldGoal, receptacles: Sequence[Receptacle]
) -> ALFWorldGame | None:
    """Fill the receptacles; None if a thing fits nowhere."""
    required = [goal.thing] * (2 if goal.kind is TaskType.PLACE_TWO else 1)
    required += [goal.target] * (goal.kind is TaskType.LOOK)
    types = sorted(required + random.choices(room.things, k=random.randint(8, 20)), key=_listing_key)
    things = []
    for name, type_ in zip(number_names(types), types, strict=True):
        fitting = [each for each in receptacles if type_ in FITS[each.type]]
        if goal.kind.needs is None and type_ == goal.thing:  # things to be moved must not be at the target already
            fitting = [each for each in fitting if each.type != goal.target]
        if not fitting:
            return None
        receptacle = random.choice(fitting)
        assert receptacle.at is not None
        things.append(Thing(name, type_, (receptacle.name,), at=(receptacle.at,), traits=traits_of(type_)))
    instruction = random.choice(_INSTRUCTIONS[goal.kind])
    return ALFWorldGame(
        task=instruction.format(thing=goal.thing.lower(), target=goal.target.lower()),
        goal=goal,
        start=0,
        receptacles=tuple(receptacles),
        things=tuple(things),
        fits={each.type: FITS[each.type] for each in receptacles},
    )


def _listing_key(type: str) -> str:
    """Sorts types in the order in which the official games list them."""
    return make_identifier(f"{type.lower()} 0", 0)


def _is_winnable(game: ALFWorldGame) -> bool:
    house = Household(game)
    if house.won:
        return False
    for _ in range(MAX_STEPS):
        command = next_command(house, explores=False)
        if command is None:
            break
        house.step(command)
    return house.won
