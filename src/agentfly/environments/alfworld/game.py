"""A game: a household, where everything lies in it, and what is to be done.

A game is plain data that fits into a row of a task file. Receptacles and things stand in the order in which the world
lists them, and their names are those that the player reads: `cabinet 3`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from agentfly.errors import DataError


class Kind(enum.Enum):
    """The six kinds of task, by the names of the benchmark."""

    PLACE = "pick_and_place_simple"
    LOOK = "look_at_obj_in_light"
    CLEAN = "pick_clean_then_place_in_recep"
    HEAT = "pick_heat_then_place_in_recep"
    COOL = "pick_cool_then_place_in_recep"
    PLACE_TWO = "pick_two_obj_and_place"

    @property
    def needs(self) -> tuple[str, str] | None:
        """The trait that a thing must have to be treated, and the one it then has; None where it is only moved."""
        treatments = {
            Kind.CLEAN: ("cleanable", "isClean"),
            Kind.HEAT: ("heatable", "isHot"),
            Kind.COOL: ("coolable", "isCool"),
        }
        return treatments.get(self)


TRAITS = frozenset(
    {
        *("pickupable", "moveable", "cleanable", "heatable", "coolable", "toggleable", "sliceable"),
        *("isReceptacleObject", "isClean", "isHot", "isCool", "isToggled", "isOn", "isSliced"),
    }
)
"""What a thing can be, in the words of the planning domain."""
APPLIANCES = {
    "cleanable": frozenset({"Sink", "SinkBasin"}),
    "heatable": frozenset({"Microwave"}),
    "coolable": frozenset({"Fridge"}),
}
"""In which types of receptacle a thing of that trait is treated."""
KNIVES = frozenset({"Knife", "ButterKnife"})


@dataclass(frozen=True, slots=True)
class Goal:
    """What is to be done, with things of which type."""

    kind: Kind
    thing: str
    """The type of the thing, such as `Mug`."""
    target: str
    """The type of the receptacle it belongs in; for `LOOK`, the type of the lamp."""


@dataclass(frozen=True, slots=True)
class Receptacle:
    """Something that holds things and stays where it is."""

    name: str
    type: str
    at: int | None
    """The place one stands at to use it; None where it cannot be reached."""
    openable: bool = False
    opened: bool = False


@dataclass(frozen=True, slots=True)
class Thing:
    """Something that lies somewhere."""

    name: str
    type: str
    inside: tuple[str, ...] = ()
    """The receptacles it is in; a thing on a shelf of a cabinet may be in both."""
    at: tuple[int, ...] = ()
    traits: frozenset[str] = frozenset()
    holds: tuple[str, ...] = ()
    """The things inside it, as a box has them. They never leave it."""


@dataclass(frozen=True)
class Game:
    """A household and a task in it."""

    task: str
    """The task in words."""
    goal: Goal
    start: int
    """Where the player stands at first."""
    receptacles: tuple[Receptacle, ...]
    things: tuple[Thing, ...]
    fits: Mapping[str, frozenset[str]]
    """By the type of a receptacle: the types of things that may be put there."""

    def __post_init__(self) -> None:
        names = [each.name for each in self.receptacles] + [each.name for each in self.things]
        if len(set(names)) < len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise DataError(f"a game names several things {', '.join(map(repr, twice))}; every name must be its own")
        known = {each.name for each in self.receptacles}
        for thing in self.things:
            if lost := [name for name in thing.inside if name not in known]:
                raise DataError(f"{thing.name!r} is in {lost[0]!r}, which is no receptacle of the game")
            if odd := thing.traits - TRAITS:
                raise DataError(f"{thing.name!r} is {sorted(odd)[0]!r}; it may be {', '.join(sorted(TRAITS))}")

    def to_json(self) -> dict[str, Any]:
        """The game as a column of a task; what is usual is left out."""
        return {
            "task": self.task,
            "goal": {"kind": self.goal.kind.value, "thing": self.goal.thing, "target": self.goal.target},
            "start": self.start,
            "receptacles": [_told(each) for each in self.receptacles],
            "things": [_told(each) for each in self.things],
            "fits": {receptacle: sorted(things) for receptacle, things in self.fits.items()},
        }

    @classmethod
    def from_json(cls, value: object) -> Game:
        """Read what `to_json` wrote."""
        try:
            return cls._read(value)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(
                f"this is no game of the household: {type(error).__name__} {error}; the column 'game' is made by "
                "ALFWorld.draw_tasks or official_tasks"
            ) from error

    @classmethod
    def _read(cls, value: Any) -> Game:
        goal = value["goal"]
        receptacles = [Receptacle(**{"at": None, **each}) for each in value["receptacles"]]
        things = [_thing(each) for each in value["things"]]
        fits = {str(name): frozenset(types) for name, types in value["fits"].items()}
        meant = Goal(Kind(goal["kind"]), str(goal["thing"]), str(goal["target"]))
        return cls(str(value["task"]), meant, int(value["start"]), tuple(receptacles), tuple(things), fits)


def _thing(each: Mapping[str, Any]) -> Thing:
    inside, at, traits, holds = (_tuple(each, field) for field in ("inside", "at", "traits", "holds"))
    return Thing(each["name"], each["type"], inside, at, frozenset(traits), holds)


def _tuple(each: Mapping[str, Any], field: str) -> tuple[Any, ...]:
    given = each.get(field, ())
    if not isinstance(given, list | tuple):
        raise TypeError(f"{field} must be a list, not {given!r:.40}")
    return tuple(given)


def _told(each: Receptacle | Thing) -> dict[str, Any]:
    fields = {name: getattr(each, name) for name in each.__slots__}
    return {name: _plain(value) for name, value in fields.items() if value or (name == "at" and value == 0)}


def _plain(value: Any) -> Any:
    if isinstance(value, frozenset):
        return sorted(value)
    return list(value) if isinstance(value, tuple) else value


def numbered(types: Iterable[str]) -> list[str]:
    """Names in the order of the types, counted down within each: `drawer 2`, `drawer 1`."""
    names = [type.lower() for type in types]
    left = {name: names.count(name) for name in names}
    told = []
    for name in names:
        told.append(f"{name} {left[name]}")
        left[name] -= 1
    return told
