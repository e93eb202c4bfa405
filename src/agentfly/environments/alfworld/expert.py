"""The scripted expert of ALFWorld.

It is stateless: the next command depends on the current state only, so it works after arbitrary earlier commands. An
exploring expert uses only what the player has read, so its games can be imitated; otherwise it knows all locations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from agentfly.environments.alfworld.game import APPLIANCES, Receptacle, TaskType, Thing
from agentfly.environments.alfworld.household import TREATMENTS, Household


def next_command(house: Household, *, explores: bool) -> str | None:
    """The next command toward the goal; None if it is reached or unreachable."""
    return None if house.won else _Planner(house, explores).plan()


class _Planner:
    def __init__(self, house: Household, explores: bool) -> None:
        self.house = house
        self.goal = house.game.goal
        # Receptacles at the current location first, then those that need not be opened.
        self.reachable = sorted(
            (each for each in house.game.receptacles if each.at is not None),
            key=lambda each: (each.at != house.place, each.openable and each.name not in house.opened),
        )
        known = [each for each in self.reachable if not explores or each.name in house.seen]
        self.unseen = [each for each in self.reachable if explores and each.name not in house.seen]
        self.located = [(thing, each) for each in known for thing in house.contents(each)]
        """The known things and their receptacles."""

    def plan(self) -> str | None:
        held, kind = self.house.held, self.goal.kind
        if held is not None and not self._matches_goal(held):
            return self._put(held, self.reachable)
        if kind is TaskType.LOOK:
            return self._fetch(self._matches_goal) if held is None else self._switch_on_lamp()
        # All things go to the receptacle of the target type that already holds most of them.
        target = max(
            (each for each in self.reachable if each.type == self.goal.target),
            key=lambda each: sum(map(self._matches_goal, self.house.contents(each))),
            default=None,
        )
        if held is None:
            placed: set[str] = set()
            if target is not None and kind is TaskType.PLACE_TWO:
                placed = {thing.name for thing in self.house.contents(target)}
            return self._fetch(lambda thing: self._matches_goal(thing) and thing.name not in placed)
        return self._treat(held) or self._put(held, [target] if target else [])

    def _matches_goal(self, thing: Thing) -> bool:
        needs = self.goal.kind.needs
        return thing.type == self.goal.thing and (needs is None or needs[0] in thing.traits)

    def _reach(self, receptacle: Receptacle, *, inside: bool = True) -> str | None:
        """The next command to reach a receptacle and, with `inside`, its contents; None if nothing is left to do."""
        if receptacle.at != self.house.place:
            return f"go to {receptacle.name}"
        return None if not inside or self.house.is_accessible(receptacle) else f"open {receptacle.name}"

    def _fetch(self, matches: Callable[[Thing], bool]) -> str | None:
        for thing, receptacle in self.located:
            if matches(thing) and "pickupable" in thing.traits:
                return self._reach(receptacle) or f"take {thing.name} from {receptacle.name}"
        return self._explore()

    def _switch_on_lamp(self) -> str | None:
        for thing, receptacle in self.located:
            if thing.type == self.goal.target and "toggleable" in thing.traits:
                return self._reach(receptacle, inside=False) or f"use {thing.name}"
        return self._explore()

    def _explore(self) -> str | None:
        if not self.unseen:
            return None
        return self._reach(self.unseen[0]) or f"examine {self.unseen[0].name}"

    def _treat(self, held: Thing) -> str | None:
        """The next command to clean, heat or cool the held thing; None if it is done or not asked for."""
        needs = self.goal.kind.needs
        if needs is None or needs[1] in self.house.traits[held.name]:
            return None
        trait, _ = needs
        for receptacle in self.reachable:
            if receptacle.type in APPLIANCES[trait]:
                command = f"{TREATMENTS[trait][0]} {held.name} with {receptacle.name}"
                return self._reach(receptacle, inside=False) or command
        return None

    def _put(self, held: Thing, receptacles: Iterable[Receptacle]) -> str | None:
        for receptacle in receptacles:
            if held.type in self.house.game.fits.get(receptacle.type, ()):
                return self._reach(receptacle) or f"move {held.name} to {receptacle.name}"
        return None
