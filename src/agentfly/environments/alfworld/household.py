"""The rules of the household: what can be done in it, what then changes, and what the player reads.

They are those of the ALFRED planning domain as the official games interpret it. Every command that would do something
is listed in `commands`; any other text does nothing and says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from agentfly.environments.alfworld import words
from agentfly.environments.alfworld.game import APPLIANCES, KNIVES, Game, Goal, Kind, Receptacle, Thing

TREATMENTS = {
    "cleanable": ("clean", "isClean", None),
    "heatable": ("heat", "isHot", "isCool"),
    "coolable": ("cool", "isCool", "isHot"),
}
"""By trait: the verb, what the thing becomes, and what it then no longer is."""


class Household:
    """A game being played."""

    def __init__(self, game: Game) -> None:
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
        for number, thing in enumerate(game.things):
            for name in thing.inside:
                self._contents[name].add(number)
        self._taken_from: dict[str, set[str]] = {}
        """By thing: receptacles it was taken from and not put back into."""
        self._here: dict[int, list[Receptacle]] = {}
        for each in game.receptacles:
            if each.at is not None:
                self._here.setdefault(each.at, []).append(each)
        self._going: dict[int, dict[str, Callable[[], str]]] = {}
        self._possible: dict[str, Callable[[], str]] | None = None

    # ── what is read ──

    def introduction(self) -> str:
        """What is said before the first command."""
        view = (
            self._look()
            if self.here
            else words.middle_of_room([e.name for e in self.game.receptacles if e.at is not None])
        )
        return words.introduction(view, self.game.task)

    @property
    def here(self) -> list[Receptacle]:
        """The receptacles within reach."""
        return self._here.get(self.place, [])

    def contents(self, receptacle: Receptacle) -> list[Thing]:
        """The things in a receptacle, seen or not."""
        return [self.game.things[number] for number in sorted(self._contents[receptacle.name])]

    def accessible(self, receptacle: Receptacle) -> bool:
        """Whether it is open, or need not be opened."""
        return not receptacle.openable or receptacle.name in self.opened

    @property
    def won(self) -> bool:
        """Whether the goal is reached as things stand now."""
        goal, held = self.game.goal, self.held
        if goal.kind is not Kind.LOOK:
            wanted = 2 if goal.kind is Kind.PLACE_TWO else 1
            targets = (each for each in self.game.receptacles if each.type == goal.target)
            return any(sum(self._counts(goal, thing) for thing in self.contents(each)) >= wanted for each in targets)
        if held is None or held.type != goal.thing:
            return False
        lit = (self.traits[each.name] for r in self.here for each in self.contents(r) if each.type == goal.target)
        return any({"toggleable", "isToggled"} <= traits for traits in lit)

    def _counts(self, goal: Goal, thing: Thing) -> bool:
        """Whether a thing in the right place is one that was asked for."""
        return thing.type == goal.thing and (
            goal.kind.needs is None or self.traits[thing.name].issuperset(goal.kind.needs)
        )

    # ── what is done ──

    @property
    def commands(self) -> list[str]:
        """Every command that does something now, in alphabetical order."""
        return sorted(self._doable())

    def step(self, command: str) -> str:
        """Carry out a command, and say what the player reads."""
        action = self._doable().get(command.strip())
        if action is None:
            return words.NOTHING_HAPPENS
        self._possible = None
        return action()

    def _doable(self) -> dict[str, Callable[[], str]]:
        if self._possible is None:
            self._possible = {**self._departures(), **dict(self._actions_here())}
        return self._possible

    def _departures(self) -> dict[str, Callable[[], str]]:
        """What can be done from everywhere, and the ways to what is not here."""
        if self.place not in self._going:
            away = [each for each in self.game.receptacles if each.at is not None and each.at != self.place]
            self._going[self.place] = {
                "look": self._look,
                "inventory": lambda: words.inventory(self.held.name if self.held else None),
                "help": words.help_text,
                **{f"go to {each.name}": partial(self._go, each) for each in away},
            }
        return self._going[self.place]

    def _actions_here(self) -> Iterator[tuple[str, Callable[[], str]]]:
        held = self.held
        for receptacle in self.here:
            yield f"examine {receptacle.name}", partial(self._view, receptacle)
            if receptacle.openable:
                verb, action = ("close", self._close) if receptacle.name in self.opened else ("open", self._open)
                yield f"{verb} {receptacle.name}", partial(action, receptacle)
            yield from self._actions_on_contents(receptacle)
            if held is not None:
                yield from self._actions_with(held, receptacle)
        if held is not None:
            yield f"examine {held.name}", partial(self._examine, held)  # a thing is examined in the hand only
            if held.type in KNIVES:
                yield from self._slicing(held)

    def _actions_on_contents(self, receptacle: Receptacle) -> Iterator[tuple[str, Callable[[], str]]]:
        takeable = self.held is None and self.accessible(receptacle)
        for thing in self.contents(receptacle):
            if takeable and "pickupable" in thing.traits:
                yield f"take {thing.name} from {receptacle.name}", partial(self._take, thing, receptacle)
            if "toggleable" in thing.traits:  # the rules let one switch on a lamp in a closed cupboard
                yield f"use {thing.name}", partial(self._use, thing)

    def _actions_with(self, held: Thing, receptacle: Receptacle) -> Iterator[tuple[str, Callable[[], str]]]:
        if self.accessible(receptacle) and held.type in self.game.fits.get(receptacle.type, ()):
            yield f"move {held.name} to {receptacle.name}", partial(self._put, held, receptacle)
        for trait, (verb, _, _) in TREATMENTS.items():
            if trait in held.traits and receptacle.type in APPLIANCES[trait]:
                yield f"{verb} {held.name} with {receptacle.name}", partial(self._treat, held, receptacle, trait)

    def _slicing(self, knife: Thing) -> Iterator[tuple[str, Callable[[], str]]]:
        for thing in self.game.things:
            if "sliceable" in thing.traits and self.place in self._at[thing.name]:
                yield f"slice {thing.name} with {knife.name}", partial(self._slice, thing, knife)

    # ── what then changes ──

    def _look(self) -> str:
        if not self.here:
            return words.middle_of_room([])  # from the middle of the room one sees it all only once, at the start
        beside = [
            thing.name
            for thing in self.game.things
            if thing.name in self._taken_from and self.place in self._at[thing.name]
            for receptacle in self.here
            if receptacle.name in self._taken_from[thing.name]
        ]
        return words.facing([each.name for each in self.here], beside)

    def _view(self, receptacle: Receptacle) -> str:
        if self.accessible(receptacle):
            self.seen.add(receptacle.name)
        inside = [thing.name for thing in self.contents(receptacle)]
        opened = receptacle.name in self.opened
        return words.receptacle_view(receptacle.name, inside, openable=receptacle.openable, opened=opened)

    def _examine(self, thing: Thing) -> str:
        return words.thing_view(thing.name, self.traits[thing.name], thing.holds)

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
        verb, becomes, no_longer = TREATMENTS[trait]
        self.traits[thing.name].add(becomes)
        self.traits[thing.name].discard(no_longer or "")
        return f"You {verb} the {thing.name} using the {receptacle.name}."

    def _use(self, thing: Thing) -> str:
        self.traits[thing.name].add("isToggled")  # which is what the goals ask for, and it never goes away
        return f"You turn on the {thing.name}."

    def _slice(self, thing: Thing, knife: Thing) -> str:
        self.traits[thing.name].add("isSliced")
        return f"You sliced the {thing.name} with the {knife.name}."
