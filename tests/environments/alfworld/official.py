"""The official engine of ALFWorld, which ours is compared with: `pip install alfworld 'textworld[pddl]'`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from agentfly.environments.alfworld.game import ALFWorldGame, ALFWorldGoal, TaskType
from agentfly.environments.alfworld.household import Household
from agentfly.environments.alfworld.pddl import make_identifier

_DOMAIN_TYPES = {"rtype": {"Sink", "SinkBasin", "Microwave", "Fridge"}, "otype": {"Knife", "ButterKnife"}}
"""Types that the domain's rules mention. Every problem must declare them."""


class OfficialEngine:
    """A game played by the official engine, TextWorld with ALFWorld's domain and grammar.

    It has the interface and the results of `Household`, which is tested against it, and is about a thousand times
    slower.
    """

    def __init__(self, game: ALFWorldGame, **texts: str) -> None:
        """`texts` override `pddl_problem`, `pddl_domain` or `grammar`, as in game files."""
        import textworld
        from alfworld import info
        from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
        from textworld.envs.pddl import PddlEnv

        with open(info.ALFRED_PDDL_PATH) as domain, open(info.ALFRED_TWL2_PATH) as grammar:
            defaults = {"pddl_domain": domain.read(), "grammar": grammar.read().replace("UNKNOWN GOAL.", game.task)}
        infos = textworld.EnvInfos(won=True, admissible_commands=True)
        self._engine: Any = AlfredDemangler(PddlEnv(infos))
        self._engine.load({**defaults, "pddl_problem": write_problem(game), **texts})
        self._state = self._engine.reset()

    def introduction(self) -> str:
        """Observation before the first command."""
        return str(self._state.feedback)

    def step(self, command: str) -> str:
        """Carry out a command and return the observation."""
        self._state, _, _ = self._engine.step(command)
        # The package's grammar adds a blank line before the help text. The official games do not.
        return str(self._state.feedback).removeprefix("\n")

    @property
    def commands(self) -> list[str]:
        """All admissible commands."""
        return list(self._state["admissible_commands"])

    @property
    def won(self) -> bool:
        """Whether the goal currently holds."""
        return bool(self._state["won"])

    def close(self) -> None:
        """Unload the planner's shared library."""
        library = getattr(self._engine, "downward_lib", None)
        if library is not None:
            import fast_downward

            fast_downward.close_lib(library)


ALFWorldEngine = Household | OfficialEngine
"""The two engines have the same interface."""


def write_problem(game: ALFWorldGame) -> str:
    """The game as a PDDL problem; `read_problem` gives everything the same name again."""
    names = [receptacle.name for receptacle in game.receptacles] + [thing.name for thing in game.things]
    ids = {name: make_identifier(name, number) for number, name in enumerate(names)}
    places = {game.start} | {location for thing in game.things for location in thing.at}
    places |= {receptacle.at for receptacle in game.receptacles if receptacle.at is not None}

    receptacle_types = {receptacle.type for receptacle in game.receptacles} | set(game.fits)
    thing_types = {thing.type for thing in game.things} | {type_ for types in game.fits.values() for type_ in types}
    thing_types.add(game.goal.thing)
    (thing_types if game.goal.kind is TaskType.LOOK else receptacle_types).add(game.goal.target)
    declared = {
        "agent": ["player"],
        "location": sorted(f"loc_bar_{number}" for number in places),
        "receptacle": [ids[receptacle.name] for receptacle in game.receptacles],
        "object": [ids[thing.name] for thing in game.things],
        "rtype": [f"{name}Type" for name in sorted((receptacle_types | _DOMAIN_TYPES["rtype"]) - {""})],
        "otype": [f"{name}Type" for name in sorted((thing_types | _DOMAIN_TYPES["otype"]) - {""})],
    }
    objects = "\n".join(f"{name} - {kind}" for kind, names in declared.items() for name in names)
    facts = "\n".join(_facts(game, ids))
    sections = f"(:objects {objects})\n(:init {facts})\n(:goal (and {_write_goal(game.goal)}))"
    return f"(define (problem household) (:domain alfred)\n{sections})\n"


def _facts(game: ALFWorldGame, ids: Mapping[str, str]) -> Iterator[str]:
    """The atoms of the initial state."""
    yield f"(atLocation player loc_bar_{game.start})"
    for receptacle in game.receptacles:
        name = ids[receptacle.name]
        if receptacle.type:
            yield f"(receptacleType {name} {receptacle.type}Type)"
        if receptacle.at is not None:
            yield f"(receptacleAtLocation {name} loc_bar_{receptacle.at})"
        if receptacle.openable:
            yield f"(openable {name})"
        if receptacle.opened:
            yield f"(opened {name})"
    for thing in game.things:
        name = ids[thing.name]
        if thing.type:
            yield f"(objectType {name} {thing.type}Type)"
        yield from (f"({trait} {name})" for trait in sorted(thing.traits))
        yield from (f"(inReceptacle {name} {ids[inner]})" for inner in thing.inside)
        yield from (f"(objectAtLocation {name} loc_bar_{location})" for location in thing.at)
        yield from (f"(inReceptacleObject {ids[inner]} {name})" for inner in thing.holds)
    for receptacle_type, types in game.fits.items():
        yield from (f"(canContain {receptacle_type}Type {thing_type}Type)" for thing_type in sorted(types))


def _write_goal(goal: ALFWorldGoal) -> str:
    if goal.kind is TaskType.LOOK:
        lamp = f"(objectType ?lamp {goal.target}Type) (toggleable ?lamp) (isToggled ?lamp) (inReceptacle ?lamp ?r)"
        lit = f"(receptacleAtLocation ?r ?l) (atLocation ?a ?l) {lamp}"
        return (
            f"(exists (?lamp - object ?r - receptacle ?a - agent ?l - location) (and {lit}))"
            f"(exists (?o - object ?b - agent) (and (objectType ?o {goal.thing}Type) (holds ?b ?o)))"
        )

    def write_placement(variable: str) -> str:
        typed = f"(objectType {variable} {goal.thing}Type) (receptacleType ?r {goal.target}Type)"
        return f"(inReceptacle {variable} ?r) {typed}"

    if goal.kind is TaskType.PLACE_TWO:
        both = f"(not (= ?o ?p)) {write_placement('?o')} {write_placement('?p')}"
        return f"(exists (?r - receptacle ?o - object ?p - object) (and {both}))"
    treated = "".join(f"({predicate} ?o) " for predicate in goal.kind.needs or ())
    return f"(exists (?r - receptacle) (exists (?o - object) (and {treated}{write_placement('?o')})))"
