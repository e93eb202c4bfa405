"""The rules of the household: admissible commands, their effects, and the observations.

The rules follow the ALFRED planning domain as the official games interpret it. `commands` lists every command that does
something. Any other text does nothing and answers "Nothing happens." The texts equal those of the official games word
for word, so that an agent trained here can play there. `docs/alfworld.md` describes how this is tested.

The scripted expert, `next_command`, is stateless: the next command depends on the current state only, so it works after
arbitrary earlier commands. An exploring expert uses only what the player has read, so its games can be imitated;
otherwise it knows all locations.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from importlib import resources

from agentfly.environments.alfworld.game import APPLIANCES, KNIVES, ALFWorldGame, Receptacle, TaskType, Thing

NOTHING_HAPPENS = "Nothing happens."
HELP = (resources.files(__package__) / "help.txt").read_text(encoding="utf-8")
TREATMENTS = {
    "cleanable": ("clean", "isClean", None),
    "heatable": ("heat", "isHot", "isCool"),
    "coolable": ("cool", "isCool", "isHot"),
}
"""By trait: the verb, the trait gained and the trait lost."""
_Action = tuple[object, ...]
"""A verb, or the trait that a treatment needs, and the things and receptacles it is applied to."""


def join_names(names: Sequence[str], article: str = "") -> str:
    """Names joined by commas and "and", each after the article; `nothing` for none."""
    names = [article + name for name in names]
    if len(names) < 2:
        return names[0] if names else "nothing"
    return f"{', '.join(names[:-1])}, and {names[-1]}"


class Household:
    """The state of a running game."""

    def __init__(self, game: ALFWorldGame) -> None:
        self.game = game
        self.place = game.start
        self.held: Thing | None = None
        self.opened = {receptacle.name for receptacle in game.receptacles if receptacle.opened}
        self.seen: set[str] = set()
        """Receptacles whose contents the player has read."""
        self.traits = {thing.name: set(thing.traits) for thing in game.things}
        self._order = {thing.name: number for number, thing in enumerate(game.things)}
        self._at = {thing.name: set(thing.at) for thing in game.things}
        self._contents: dict[str, set[int]] = {receptacle.name: set() for receptacle in game.receptacles}
        """By receptacle: indices into `game.things`."""
        for number, thing in enumerate(game.things):
            for name in thing.inside:
                self._contents[name].add(number)
        self._taken_from: dict[str, set[str]] = {}
        """By thing: receptacles it was taken from and not put back into."""
        self._receptacles_at: dict[int, list[Receptacle]] = {}
        for receptacle in game.receptacles:
            if receptacle.at is not None:
                self._receptacles_at.setdefault(receptacle.at, []).append(receptacle)
        self._global_actions_at: dict[int, dict[str, _Action]] = {}
        self._actions: dict[str, _Action] | None = None
        """Cache of the admissible commands. None after a change."""

    def introduction(self) -> str:
        """Observation before the first command. Only here the view from the middle of a room lists the room."""
        reachable = [receptacle.name for receptacle in self.game.receptacles if receptacle.at is not None]
        return f"-= Welcome to TextWorld, ALFRED! =-\n\n{self._look(reachable)}\n\nYour task is to: {self.game.task}"

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
            lamps = (lamp for r in self.here for lamp in self.contents(r) if lamp.type == goal.target)
            return any({"toggleable", "isToggled"} <= self.traits[lamp.name] for lamp in lamps)
        needs = goal.kind.needs

        def counts(thing: Thing) -> bool:
            return thing.type == goal.thing and (needs is None or self.traits[thing.name].issuperset(needs))

        needed = 2 if goal.kind is TaskType.PLACE_TWO else 1
        targets = (receptacle for receptacle in self.game.receptacles if receptacle.type == goal.target)
        return any(sum(map(counts, self.contents(receptacle))) >= needed for receptacle in targets)

    @property
    def commands(self) -> list[str]:
        """All admissible commands, in alphabetical order."""
        return sorted(self._admissible())

    def step(self, command: str) -> str:
        """Carry out a command and return the observation."""
        action = self._admissible().get(command.strip())
        if action is None:
            return NOTHING_HAPPENS
        self._actions = None
        return self._perform(action)

    def _admissible(self) -> dict[str, _Action]:
        if self._actions is None:
            if self.place not in self._global_actions_at:
                away = [
                    receptacle
                    for receptacle in self.game.receptacles
                    if receptacle.at is not None and receptacle.at != self.place
                ]
                self._global_actions_at[self.place] = {
                    "look": ("look",),
                    "inventory": ("inventory",),
                    "help": ("help",),
                    **{f"go to {receptacle.name}": ("go", receptacle) for receptacle in away},
                }
            self._actions = {**self._global_actions_at[self.place], **dict(self._local_actions())}
        return self._actions

    def _local_actions(self) -> Iterator[tuple[str, _Action]]:
        """Commands on the receptacles within reach, their contents and the held thing."""
        held = self.held
        for receptacle in self.here:
            name, accessible = receptacle.name, self.is_accessible(receptacle)
            yield f"examine {name}", ("examine", receptacle)
            if receptacle.openable:
                verb = "close" if name in self.opened else "open"
                yield f"{verb} {name}", (verb, receptacle)
            for thing in self.contents(receptacle):
                if held is None and accessible and "pickupable" in thing.traits:
                    yield f"take {thing.name} from {name}", ("take", thing, receptacle)
                if "toggleable" in thing.traits:  # the official rules allow this even in a closed receptacle
                    yield f"use {thing.name}", ("use", thing)
            if held is None:
                continue
            if accessible and held.type in self.game.fits.get(receptacle.type, ()):
                yield f"move {held.name} to {name}", ("move", held, receptacle)
            for trait, (verb, _, _) in TREATMENTS.items():
                if trait in held.traits and receptacle.type in APPLIANCES[trait]:
                    yield f"{verb} {held.name} with {name}", (trait, held, receptacle)
        if held is None:
            return
        yield f"examine {held.name}", ("examine", held)  # only the held thing can be examined
        if held.type in KNIVES:
            for thing in self.game.things:
                if "sliceable" in thing.traits and self.place in self._at[thing.name]:
                    yield f"slice {thing.name} with {held.name}", ("slice", thing, held)

    def _perform(self, action: _Action) -> str:
        """Change the state and return the observation."""
        match action:
            case ("go", Receptacle(at=int(place)) as receptacle):
                self.place = place
                return f"You arrive at {receptacle.name}. {self._describe_receptacle(receptacle)}"
            case ("examine", Receptacle() as receptacle):
                return self._describe_receptacle(receptacle)
            case ("open", Receptacle() as receptacle):
                self.opened.add(receptacle.name)
                return f"You open the {receptacle.name}. {self._describe_receptacle(receptacle)}"
            case ("close", Receptacle() as receptacle):
                self.opened.discard(receptacle.name)
                return f"You close the {receptacle.name}."
            case ("take", Thing() as thing, Receptacle() as receptacle):
                self._contents[receptacle.name].discard(self._order[thing.name])
                self._taken_from.setdefault(thing.name, set()).add(receptacle.name)
                self._at[thing.name].discard(self.place)
                self.held = thing
                return f"You pick up the {thing.name} from the {receptacle.name}."
            case ("move", Thing() as thing, Receptacle() as receptacle):
                self._contents[receptacle.name].add(self._order[thing.name])
                self._taken_from.get(thing.name, set()).discard(receptacle.name)
                self._at[thing.name].add(self.place)
                self.held = None
                return f"You move the {thing.name} to the {receptacle.name}."
            case (str(trait), Thing() as thing, Receptacle() as receptacle):
                verb, gained, lost = TREATMENTS[trait]
                self.traits[thing.name].add(gained)
                self.traits[thing.name].discard(lost or "")
                return f"You {verb} the {thing.name} using the {receptacle.name}."
            case ("use", Thing() as thing):
                self.traits[thing.name].add("isToggled")  # the goals require it, and nothing removes it
                return f"You turn on the {thing.name}."
            case ("slice", Thing() as thing, Thing() as knife):
                self.traits[thing.name].add("isSliced")
                return f"You sliced the {thing.name} with the {knife.name}."
            case ("examine", Thing() as thing):
                return self._describe_thing(thing)
            case ("look",):
                return self._look()
            case ("inventory",):
                return f"You are carrying: a {self.held.name}." if self.held else "You are not carrying anything."
            case _:
                return HELP

    def _look(self, in_room: Sequence[str] = ()) -> str:
        """View of the current place. in_room: the receptacles to list where none is within reach."""
        if not self.here:
            listed = join_names(in_room, "a ")
            return f"You are in the middle of a room. Looking quickly around you, you see {listed}."
        beside = [
            thing.name
            for thing in self.game.things
            if thing.name in self._taken_from and self.place in self._at[thing.name]
            for receptacle in self.here
            if receptacle.name in self._taken_from[thing.name]
        ]
        facing = join_names([receptacle.name for receptacle in self.here])
        return f"You are facing the {facing}. Next to it, you see {join_names(beside, 'a ')}."

    def _describe_receptacle(self, receptacle: Receptacle) -> str:
        """Description of a receptacle and, where it is accessible, its contents, which counts as having seen them."""
        name = receptacle.name
        if not self.is_accessible(receptacle):
            return f"The {name} is closed."
        self.seen.add(name)
        position = f"The {name} is open. In it" if receptacle.openable else f"On the {name}"
        return f"{position}, you see {join_names([thing.name for thing in self.contents(receptacle)], 'a ')}."

    def _describe_thing(self, thing: Thing) -> str:
        """Description of a thing and its state."""
        name, traits = thing.name, self.traits[thing.name]
        if "isReceptacleObject" in traits:
            return f"This is a normal {name}. In it, you see {join_names(thing.holds, 'a ')}."
        clean, hot, cool, sliced = (trait in traits for trait in ("isClean", "isHot", "isCool", "isSliced"))
        if hot or cool or clean:
            # The official grammar says "cold" for a thing that is only cool, else "cool".
            warmth = "hot" if hot else "cool" if cool and (clean or sliced) else "cold" if cool else ""
            state = " and ".join(filter(None, (warmth, "clean" if clean else "")))
            return f"This is a {state} {'sliced ' if sliced else ''}{name}."
        if "toggleable" in traits and "isToggled" in traits:
            return f"This {name} is on."
        if "sliceable" in traits and sliced:
            return f"This is a sliced {name}."
        return f"There's nothing special about {name}."


def next_command(house: Household, *, explores: bool) -> str | None:
    """The next command toward the goal. None if it is reached or unreachable."""
    if house.won:
        return None
    goal, needs, held = house.game.goal, house.game.goal.kind.needs, house.held
    # Receptacles at the current location first, then those that need not be opened.
    reachable = sorted(
        (receptacle for receptacle in house.game.receptacles if receptacle.at is not None),
        key=lambda receptacle: (
            receptacle.at != house.place,
            receptacle.openable and receptacle.name not in house.opened,
        ),
    )
    visited = [receptacle for receptacle in reachable if not explores or receptacle.name in house.seen]
    unseen = [receptacle for receptacle in reachable if explores and receptacle.name not in house.seen]
    located = [(thing, receptacle) for receptacle in visited for thing in house.contents(receptacle)]

    def matches_goal(thing: Thing) -> bool:
        return thing.type == goal.thing and (needs is None or needs[0] in thing.traits)

    def reach(receptacle: Receptacle, *, inside: bool = True) -> str | None:
        """The next command to reach a receptacle and, with `inside`, its contents. None if nothing is left to do."""
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
        (receptacle for receptacle in reachable if receptacle.type == goal.target),
        key=lambda receptacle: sum(map(matches_goal, house.contents(receptacle))),
        default=None,
    )
    if held is not None and goal.kind is not TaskType.LOOK:
        if needs is not None and needs[1] not in house.traits[held.name]:
            for receptacle in reachable:
                if receptacle.type in APPLIANCES[needs[0]]:
                    treat = f"{TREATMENTS[needs[0]][0]} {held.name} with {receptacle.name}"
                    return reach(receptacle, inside=False) or treat
        return put(held, [target] if target else [])

    # Take a thing of the goal that is not yet at the target, or switch on the lamp. Search where neither is known.
    placed: set[str] = set()
    if target is not None and goal.kind is TaskType.PLACE_TWO:
        placed = {thing.name for thing in house.contents(target)}
    for thing, receptacle in located:
        if held is None and matches_goal(thing) and thing.name not in placed and "pickupable" in thing.traits:
            return reach(receptacle) or f"take {thing.name} from {receptacle.name}"
        if held is not None and thing.type == goal.target and "toggleable" in thing.traits:
            return reach(receptacle, inside=False) or f"use {thing.name}"
    return (reach(unseen[0]) or f"examine {unseen[0].name}") if unseen else None
