"""The scripted expert of ALFWorld.

It is stateless: the next command depends on the current state only, so it works after arbitrary earlier commands. An
exploring expert uses only what the player has read, so its games can be imitated; otherwise it knows all locations.
"""

from __future__ import annotations

from collections.abc import Iterable

from agentfly.environments.alfworld.game import APPLIANCES, Receptacle, TaskType, Thing
from agentfly.environments.alfworld.household import TREATMENTS, Household


def next_command(house: Household, *, explores: bool) -> str | None:
    """The next command toward the goal; None if it is reached or unreachable."""
    if house.won:
        return None
    goal, needs, held = house.game.goal, house.game.goal.kind.needs, house.held
    # Receptacles at the current location first, then those that need not be opened.
    reachable = sorted(
        (each for each in house.game.receptacles if each.at is not None),
        key=lambda each: (each.at != house.place, each.openable and each.name not in house.opened),
    )
    known = [each for each in reachable if not explores or each.name in house.seen]
    unseen = [each for each in reachable if explores and each.name not in house.seen]
    located = [(thing, each) for each in known for thing in house.contents(each)]

    def matches_goal(thing: Thing) -> bool:
        return thing.type == goal.thing and (needs is None or needs[0] in thing.traits)

    def reach(receptacle: Receptacle, *, inside: bool = True) -> str | None:
        """The next command to reach a receptacle and, with `inside`, its contents; None if nothing is left to do."""
        if receptacle.at != house.place:
            return f"go to {receptacle.name}"
        return None if not inside or house.is_accessible(receptacle) else f"open {receptacle.name}"

    def put(thing: Thing, receptacles: Iterable[Receptacle]) -> str | None:
        for receptacle in receptacles:
            if thing.type in house.game.fits.get(receptacle.type, ()):
                return reach(receptacle) or f"move {thing.name} to {receptacle.name}"
        return None

    if held is not None and not matches_goal(held):
        return put(held, reachable)
    # All things go to the receptacle of the target type that already holds most of them.
    target = max(
        (each for each in reachable if each.type == goal.target),
        key=lambda each: sum(map(matches_goal, house.contents(each))),
        default=None,
    )
    if held is not None and goal.kind is not TaskType.LOOK:
        if needs is not None and needs[1] not in house.traits[held.name]:
            for receptacle in reachable:
                if receptacle.type in APPLIANCES[needs[0]]:
                    treat = f"{TREATMENTS[needs[0]][0]} {held.name} with {receptacle.name}"
                    return reach(receptacle, inside=False) or treat
        return put(held, [target] if target else [])

    # Take a thing of the goal that is not yet at the target, or switch on the lamp; search where neither is known.
    placed: set[str] = set()
    if target is not None and goal.kind is TaskType.PLACE_TWO:
        placed = {thing.name for thing in house.contents(target)}
    for thing, receptacle in located:
        if held is None and matches_goal(thing) and thing.name not in placed and "pickupable" in thing.traits:
            return reach(receptacle) or f"take {thing.name} from {receptacle.name}"
        if held is not None and thing.type == goal.target and "toggleable" in thing.traits:
            return reach(receptacle, inside=False) or f"use {thing.name}"
    return (reach(unseen[0]) or f"examine {unseen[0].name}") if unseen else None
