"""The rules of the household: admissible commands, their effects, and the observations.

They follow the ALFRED planning domain as the official games interpret it. `commands` lists every command that does
something; any other text does nothing and answers "Nothing happens."
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from agentfly.environments.alfworld import observations
from agentfly.environments.alfworld.game import APPLIANCES, KNIVES, ALFWorldGame, Receptacle, TaskType, Thing

TREATMENTS = {
    "cleanable": ("clean", "isClean", None),
    "heatable": ("heat", "isHot", "isCool"),
    "coolable": ("cool", "isCool", "isHot"),
}
"""By trait: the verb, the trait gained and the trait lost."""


class Household:
    """The state of a running game."""

    def __init__(self, game: ALFWorldGame) -> None:
        self.game = game
        self.place = game.start
        self.held: Thing | None = None
        self.opened = {each.name for each in game.receptacles if each.opened}
        self.seen: set[str] = set()
        """Receptacles whose contents the player has read."""
        self.traits = {each.name: set(each.traits) for each in game.things}
        self._order = {each.name: number for number, each in enumerate(game.things)}
        self._at = {each.name: set(each.at) for each in game.things}
        self._contents: dict[str, set[int]] = {each.name: set() for each in game.receptacles}
        """By receptacle: indices into `game.things`."""
        for number, thing in enumerate(game.things):
            for name in thing.inside:
                self._contents[name].add(number)
        self._taken_from: dict[str, set[str]] = {}
        """By thing: receptacles it was taken from and not put back into."""
        self._receptacles_at: dict[int, list[Receptacle]] = {}
        for each in game.receptacles:
            if each.at is not None:
                self._receptacles_at.setdefault(each.at, []).append(each)
        self._global_actions_at: dict[int, dict[str, Callable[[], str]]] = {}
        self._actions: dict[str, Callable[[], str]] | None = None
        """Cache of the admissible commands; None after a change."""

    def introduction(self) -> str:
        """Observation before the first command."""
        if self.here:
            view = self._look()
        else:
            view = observations.middle_of_room([each.name for each in self.game.receptacles if each.at is not None])
        return observations.introduction(view, self.game.task)

    @property
    def here(self) -> list[Receptacle]:
        """The receptacles within reach."""
        return self._receptacles_at.get(self.place, [])

    def contents(self, receptacle: Receptacle) -> list[Thing]:
        """The things in a receptacle, seen or not."""
        return [self.game.things[number] for number in sorted(self._contents[receptacle.name])]

    def is_accessible(self, receptacle: Receptacle) -> bool:
        """Whether it is open or has no door."""
        return not receptacle.openable or receptacle.name in self.opened

    @property
    def won(self) -> bool:
        """Whether the goal currently holds."""
        goal = self.game.goal
        if goal.kind is TaskType.LOOK:
            if self.held is None or self.held.type != goal.thing:
                return False
            lamps = (each for r in self.here for each in self.contents(r) if each.type == goal.target)
            return any({"toggleable", "isToggled"} <= self.traits[lamp.name] for lamp in lamps)
        needs = goal.kind.needs

        def counts(thing: Thing) -> bool:
            return thing.type == goal.thing and (needs is None or self.traits[thing.name].issuperset(needs))

        wanted = 2 if goal.kind is TaskType.PLACE_TWO else 1
        targets = (each for each in self.game.receptacles if each.type == goal.target)
        return any(sum(map(counts, self.contents(each))) >= wanted for each in targets)

    @property
    def commands(self) -> list[str]:
        """All admissible commands, in alphabetical order."""
        return sorted(self._admissible())

    def step(self, command: str) -> str:
        """Carry out a command and return the observation."""
        action = self._admissible().get(command.strip())
        if action is None:
            return observations.NOTHING_HAPPENS
        self._actions = None
        return action()

    def _admissible(self) -> dict[str, Callable[[], str]]:
        if self._actions is None:
            if self.place not in self._global_actions_at:
                away = [each for each in self.game.receptacles if each.at is not None and each.at != self.place]
                self._global_actions_at[self.place] = {
                    "look": self._look,
                    "inventory": lambda: observations.inventory(self.held.name if self.held else None),
                    "help": observations.help_text,
                    **{f"go to {each.name}": partial(self._go, each) for each in away},
                }
            self._actions = {**self._global_actions_at[self.place], **dict(self._local_actions())}
        return self._actions

    def _local_actions(self) -> Iterator[tuple[str, Callable[[], str]]]:
        """Commands on the receptacles within reach, their contents and the held thing."""
        held = self.held
        for receptacle in self.here:
            name, accessible = receptacle.name, self.is_accessible(receptacle)
            yield f"examine {name}", partial(self._view, receptacle)
            if receptacle.openable:
                verb, action = ("close", self._close) if name in self.opened else ("open", self._open)
                yield f"{verb} {name}", partial(action, receptacle)
            for thing in self.contents(receptacle):
                if held is None and accessible and "pickupable" in thing.traits:
                    yield f"take {thing.name} from {name}", partial(self._take, thing, receptacle)
                if "toggleable" in thing.traits:  # the official rules allow this even in a closed receptacle
                    yield f"use {thing.name}", partial(self._use, thing)
            if held is None:
                continue
            if accessible and held.type in self.game.fits.get(receptacle.type, ()):
                yield f"move {held.name} to {name}", partial(self._put, held, receptacle)
            for trait, (verb, _, _) in TREATMENTS.items():
                if trait in held.traits and receptacle.type in APPLIANCES[trait]:
                    yield f"{verb} {held.name} with {name}", partial(self._treat, held, receptacle, trait)
        if held is None:
            return
        yield f"examine {held.name}", partial(self._examine, held)  # only the held thing can be examined
        if held.type in KNIVES:
            for thing in self.game.things:
                if "sliceable" in thing.traits and self.place in self._at[thing.name]:
                    yield f"slice {thing.name} with {held.name}", partial(self._slice, thing, held)

    # Actions: each changes the state and returns the observation.

    def _look(self) -> str:
        if not self.here:
            return observations.middle_of_room([])  # only the introduction lists the room from its middle
        beside = [
            thing.name
            for thing in self.game.things
            if thing.name in self._taken_from and self.place in self._at[thing.name]
            for receptacle in self.here
            if receptacle.name in self._taken_from[thing.name]
        ]
        return observations.facing([each.name for each in self.here], beside)

    def _view(self, receptacle: Receptacle) -> str:
        if self.is_accessible(receptacle):
            self.seen.add(receptacle.name)
        inside = [thing.name for thing in self.contents(receptacle)]
        opened = receptacle.name in self.opened
        return observations.receptacle_view(receptacle.name, inside, openable=receptacle.openable, opened=opened)

    def _examine(self, thing: Thing) -> str:
        return observations.thing_view(thing.name, self.traits[thing.name], thing.holds)

    def _go(self, receptacle: Receptacle) -> str:
        assert receptacle.at is not None
        self.place = receptacle.at
        return f"You arrive at {receptacle.name}. {self._view(receptacle)}"

    def _open(self, receptacle: Receptacle) -> str:
        self.opened.add(receptacle.name)
        return f"You open the {receptacle.name}. {self._view(receptacle)}"

    def _close(self, receptacle: Receptacle) -> str:
        self.opened.discard(receptacle.name)
        return f"You close the {receptacle.name}."

    def _take(self, thing: Thing, receptacle: Receptacle) -> str:
        self._contents[receptacle.name].discard(self._order[thing.name])
        self._taken_from.setdefault(thing.name, set()).add(receptacle.name)
        self._at[thing.name].discard(self.place)
        self.held = thing
        return f"You pick up the {thing.name} from the {receptacle.name}."

    def _put(self, thing: Thing, receptacle: Receptacle) -> str:
        self._contents[receptacle.name].add(self._order[thing.name])
        self._taken_from.get(thing.name, set()).discard(receptacle.name)
        self._at[thing.name].add(self.place)
        self.held = None
        return f"You move the {thing.name} to the {receptacle.name}."

    def _treat(self, thing: Thing, receptacle: Receptacle, trait: str) -> str:
        verb, gained, lost = TREATMENTS[trait]
        self.traits[thing.name].add(gained)
        self.traits[thing.name].discard(lost or "")
        return f"You {verb} the {thing.name} using the {receptacle.name}."

    def _use(self, thing: Thing) -> str:
        self.traits[thing.name].add("isToggled")  # the goals require it, and nothing removes it
        return f"You turn on the {thing.name}."

    def _slice(self, thing: Thing, knife: Thing) -> str:
        self.traits[thing.name].add("isSliced")
        return f"You sliced the {thing.name} with the {knife.name}."
