"""What a good player does next.

Asked anew in every state, so it copes with whatever was done before. One that explores knows only what the player has
read: it searches, and its games can be imitated. One that does not explore knows where everything is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from agentfly.environments.alfworld.game import APPLIANCES, Kind, Receptacle, Thing
from agentfly.environments.alfworld.household import TREATMENTS, Household


def next_command(house: Household, *, explores: bool) -> str | None:
    """The next command towards the goal; None where it is reached, or where nothing leads there."""
    return None if house.won else _Player(house, explores).command()


class _Player:
    def __init__(self, house: Household, explores: bool) -> None:
        self.house, self.goal, self.held = house, house.game.goal, house.held
        self.reachable = sorted(
            (each for each in house.game.receptacles if each.at is not None),
            key=lambda each: (each.at != house.place, each.openable and each.name not in house.opened),
        )
        """What is here first, then what need not be opened."""
        known = [each for each in self.reachable if not explores or each.name in house.seen]
        self.unseen = [each for each in self.reachable if explores and each.name not in house.seen]
        self.lying = [(thing, each) for each in known for thing in house.contents(each)]
        """The things the player knows of, and where they are."""

    def command(self) -> str | None:
        if self.held is not None and not self._wanted(self.held):
            return self._put_down(self.held)
        if self.goal.kind is Kind.LOOK:
            return self._fetch(self._wanted) if self.held is None else self._switch_on_lamp()
        target = self._target()
        if self.held is None:
            placed = {thing.name for thing in self.house.contents(target)} if target else set()
            fixed = placed if self.goal.kind is Kind.PLACE_TWO else set()
            return self._fetch(lambda thing: self._wanted(thing) and thing.name not in fixed)
        return self._treat(self.held) or self._put(self.held, [target] if target else [])

    def _wanted(self, thing: Thing) -> bool:
        needs = self.goal.kind.needs
        return thing.type == self.goal.thing and (needs is None or needs[0] in thing.traits)

    def _target(self) -> Receptacle | None:
        """The receptacle that everything goes to: the one that has most of it already."""

        def wanted_in(receptacle: Receptacle) -> int:
            return sum(self._wanted(thing) for thing in self.house.contents(receptacle))

        of_type = [each for each in self.reachable if each.type == self.goal.target]
        return max(of_type, key=wanted_in, default=None)

    def _reach(self, receptacle: Receptacle, *, inside: bool = True) -> str | None:
        """A step towards it; None where one is there and, if it matters, it is open."""
        if receptacle.at != self.house.place:
            return f"go to {receptacle.name}"
        return None if not inside or self.house.accessible(receptacle) else f"open {receptacle.name}"

    def _fetch(self, wanted: Callable[[Thing], bool]) -> str | None:
        for thing, receptacle in self.lying:
            if wanted(thing) and "pickupable" in thing.traits:
                return self._reach(receptacle) or f"take {thing.name} from {receptacle.name}"
        return self._explore()

    def _switch_on_lamp(self) -> str | None:
        for thing, receptacle in self.lying:
            if thing.type == self.goal.target and "toggleable" in thing.traits:
                return self._reach(receptacle, inside=False) or f"use {thing.name}"
        return self._explore()

    def _explore(self) -> str | None:
        for receptacle in self.unseen:
            return self._reach(receptacle) or f"examine {receptacle.name}"
        return None

    def _treat(self, held: Thing) -> str | None:
        """A step towards what the goal asks to be done with the thing; None where it is done."""
        needs = self.goal.kind.needs
        if needs is None or needs[1] in self.house.traits[held.name]:
            return None
        trait, _ = needs
        for receptacle in self.reachable:
            if receptacle.type in APPLIANCES[trait]:
                treat = f"{TREATMENTS[trait][0]} {held.name} with {receptacle.name}"
                return self._reach(receptacle, inside=False) or treat
        return None

    def _put(self, held: Thing, where: Iterable[Receptacle]) -> str | None:
        for receptacle in where:
            if held.type in self.house.game.fits.get(receptacle.type, ()):
                return self._reach(receptacle) or f"move {held.name} to {receptacle.name}"
        return None

    def _put_down(self, held: Thing) -> str | None:
        return self._put(held, self.reachable)
