"""A game as plain data that fits into a row of a task file: a household, its contents, and the goal.

Receptacles and things are in the order in which the game lists them; names are those that the player reads, such as
`cabinet 3`.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentfly.errors import DataError


class TaskType(enum.Enum):
    """The six task types, by the names of the benchmark."""

    PLACE = "pick_and_place_simple"
    LOOK = "look_at_obj_in_light"
    CLEAN = "pick_clean_then_place_in_recep"
    HEAT = "pick_heat_then_place_in_recep"
    COOL = "pick_cool_then_place_in_recep"
    PLACE_TWO = "pick_two_obj_and_place"

    @property
    def needs(self) -> tuple[str, str] | None:
        """The trait required for the treatment and the trait it results in; None for tasks without treatment."""
        treatments = {
            TaskType.CLEAN: ("cleanable", "isClean"),
            TaskType.HEAT: ("heatable", "isHot"),
            TaskType.COOL: ("coolable", "isCool"),
        }
        return treatments.get(self)


TRAITS = frozenset(
    {
        *("pickupable", "moveable", "cleanable", "heatable", "coolable", "toggleable", "sliceable"),
        *("isReceptacleObject", "isClean", "isHot", "isCool", "isToggled", "isOn", "isSliced"),
    }
)
"""Unary predicates of things in the planning domain."""
APPLIANCES = {
    "cleanable": frozenset({"Sink", "SinkBasin"}),
    "heatable": frozenset({"Microwave"}),
    "coolable": frozenset({"Fridge"}),
}
"""By trait: the receptacle types that treat such a thing."""
KNIVES = frozenset({"Knife", "ButterKnife"})


@dataclass(frozen=True, slots=True)
class ALFWorldGoal:
    """What to do, with things of which type."""

    kind: TaskType
    thing: str
    """Type of the thing, such as `Mug`."""
    target: str
    """Type of the receptacle to put it in; for `LOOK`, type of the lamp."""


@dataclass(frozen=True, slots=True)
class Receptacle:
    """A fixed container or surface."""

    name: str
    type: str
    at: int | None
    """Location from which it can be used; None if it cannot be reached."""
    openable: bool = False
    opened: bool = False


@dataclass(frozen=True, slots=True)
class Thing:
    """An object in the household."""

    name: str
    type: str
    inside: tuple[str, ...] = ()
    """Names of the receptacles that contain it; several if, for example, a shelf is part of a cabinet."""
    at: tuple[int, ...] = ()
    traits: frozenset[str] = frozenset()
    holds: tuple[str, ...] = ()
    """Names of the things inside it, as in a box. They never leave it."""


@dataclass(frozen=True)
class ALFWorldGame:
    """A household and a task in it."""

    task: str
    """The task in natural language."""
    goal: ALFWorldGoal
    start: int
    """Initial location of the player."""
    receptacles: tuple[Receptacle, ...]
    things: tuple[Thing, ...]
    fits: Mapping[str, frozenset[str]]
    """By receptacle type: the types of things that may be put there."""

    def __post_init__(self) -> None:
        counts = Counter([each.name for each in self.receptacles] + [each.name for each in self.things])
        if duplicates := sorted(name for name, count in counts.items() if count > 1):
            raise DataError(f"names in a game must be unique; {', '.join(map(repr, duplicates))} occurs several times")
        known = {each.name for each in self.receptacles}
        for thing in self.things:
            if missing := [name for name in thing.inside if name not in known]:
                raise DataError(f"{thing.name!r} is in {missing[0]!r}, which is not a receptacle of the game")
            if unknown := thing.traits - TRAITS:
                there = ", ".join(sorted(TRAITS))
                raise DataError(f"{thing.name!r} has the unknown trait {sorted(unknown)[0]!r}; there are {there}")

    def to_json(self) -> dict[str, Any]:
        """The game as a task column; empty and default values are left out."""
        return {
            "task": self.task,
            "goal": {"kind": self.goal.kind.value, "thing": self.goal.thing, "target": self.goal.target},
            "start": self.start,
            "receptacles": [_to_json(each) for each in self.receptacles],
            "things": [_to_json(each) for each in self.things],
            "fits": {receptacle: sorted(things) for receptacle, things in self.fits.items()},
        }

    @classmethod
    def from_json(cls, value: Any) -> ALFWorldGame:
        """Inverse of `to_json`. Raises DataError for anything else."""
        try:
            goal = value["goal"]
            return cls(
                task=str(value["task"]),
                goal=ALFWorldGoal(TaskType(goal["kind"]), str(goal["thing"]), str(goal["target"])),
                start=int(value["start"]),
                receptacles=tuple(Receptacle(**{"at": None, **each}) for each in value["receptacles"]),
                things=tuple(map(_read_thing, value["things"])),
                fits={str(name): frozenset(types) for name, types in value["fits"].items()},
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(
                f"this is not an ALFWorld game: {type(error).__name__} {error}; the column 'game' is made by "
                "ALFWorld.draw_tasks or official_tasks"
            ) from error


def _read_thing(row: Mapping[str, Any]) -> Thing:
    lists: dict[str, tuple[Any, ...]] = {}
    for field in ("inside", "at", "traits", "holds"):
        value = row.get(field, ())
        if not isinstance(value, list | tuple):
            raise TypeError(f"{field} must be a list, not {value!r:.40}")
        lists[field] = tuple(value)
    traits = frozenset(lists.pop("traits"))
    return Thing(row["name"], row["type"], traits=traits, **lists)


def _to_json(each: Receptacle | Thing) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for name in each.__slots__:
        value = getattr(each, name)
        if not value and not (name == "at" and value == 0):  # location 0 is falsy but not a default
            continue
        if isinstance(value, frozenset):
            value = sorted(value)
        row[name] = list(value) if isinstance(value, tuple) else value
    return row
