"""A game as plain data that fits into a row of a task file: a household, its contents, and the goal.

Receptacles and things are in the order in which the game lists them. Names are those that the player reads, such as
`cabinet 3`.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import pydantic

from agentfly.errors import DataError
from agentfly.validation import describe_invalid


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
        """The trait required for the treatment and the trait it results in. None for tasks without treatment."""
        treatments = {"CLEAN": ("cleanable", "isClean"), "HEAT": ("heatable", "isHot"), "COOL": ("coolable", "isCool")}
        return treatments.get(self.name)


TRAITS = frozenset({
    "pickupable", "moveable", "cleanable", "heatable", "coolable", "toggleable", "sliceable", "isReceptacleObject",
    "isClean", "isHot", "isCool", "isToggled", "isOn", "isSliced",
})  # fmt: skip
"""Unary predicates of things in the planning domain."""
APPLIANCES = {
    "cleanable": frozenset({"Sink", "SinkBasin"}),
    "heatable": frozenset({"Microwave"}),
    "coolable": frozenset({"Fridge"}),
}
"""By trait: the receptacle types that treat such a thing."""
KNIVES = frozenset({"Knife", "ButterKnife"})
Names = Annotated[frozenset[str], pydantic.PlainSerializer(sorted)]


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

    __pydantic_config__: ClassVar[pydantic.ConfigDict] = {"extra": "forbid"}

    name: str
    type: str
    at: int | None = None
    """Location from which it can be used. None if it cannot be reached."""
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
    traits: Names = frozenset()
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
    fits: Mapping[str, Names]
    """By receptacle type: the types of things that may be put there."""

    def __post_init__(self) -> None:
        counts = Counter([receptacle.name for receptacle in self.receptacles] + [thing.name for thing in self.things])
        if duplicates := sorted(name for name, count in counts.items() if count > 1):
            raise DataError(f"names in a game must be unique; {', '.join(map(repr, duplicates))} occurs several times")
        receptacle_names = {receptacle.name for receptacle in self.receptacles}
        for thing in self.things:
            if missing := [name for name in thing.inside if name not in receptacle_names]:
                raise DataError(f"{thing.name!r} is in {missing[0]!r}, which is not a receptacle of the game")
            if unknown := thing.traits - TRAITS:
                traits = ", ".join(sorted(TRAITS))
                raise DataError(f"{thing.name!r} has the unknown trait {sorted(unknown)[0]!r}; there are {traits}")

    def to_json(self) -> dict[str, Any]:
        """The game as a task column. Empty and default values are left out."""
        row: dict[str, Any] = _GAME.dump_python(self, mode="json", exclude_defaults=True)
        return row

    @classmethod
    def from_json(cls, value: Any) -> ALFWorldGame:
        """Inverse of `to_json`. Raises DataError for anything else."""
        try:
            return _GAME.validate_python(value)
        except pydantic.ValidationError as error:
            raise DataError(
                f"this is not an ALFWorld game: {describe_invalid(error, with_input=True)}; the column 'game' is made "
                "by ALFWorld.draw_tasks or official_tasks"
            ) from error


_GAME = pydantic.TypeAdapter(ALFWorldGame)
