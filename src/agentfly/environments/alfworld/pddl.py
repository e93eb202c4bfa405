"""Games as PDDL problems: reads those of the official games, and writes any game for the official engine."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

from agentfly.environments.alfworld.game import TRAITS, ALFWorldGame, ALFWorldGoal, Receptacle, TaskType, Thing
from agentfly.errors import DataError

_ATOM = re.compile(r"\(([\w=-]+)\s+([^()]*)\)")
_TRAITS = {trait.lower(): trait for trait in TRAITS}
_SIGNATURES: dict[TaskType, str] = {
    TaskType.PLACE: "inreceptacle objecttype receptacletype",
    TaskType.LOOK: "objecttype objecttype toggleable istoggled receptacleatlocation atlocation inreceptacle holds",
    TaskType.CLEAN: "inreceptacle objecttype receptacletype cleanable isclean",
    TaskType.HEAT: "inreceptacle objecttype receptacletype heatable ishot",
    TaskType.COOL: "inreceptacle objecttype receptacletype coolable iscool",
    TaskType.PLACE_TWO: "inreceptacle inreceptacle objecttype objecttype receptacletype receptacletype =",
}
"""The predicates in the goal conjunction of each task type."""
_TASK_TYPES = {tuple(sorted(signature.split())): kind for kind, signature in _SIGNATURES.items()}
_DOMAIN_TYPES = {"rtype": {"Sink", "SinkBasin", "Microwave", "Fridge"}, "otype": {"Knife", "ButterKnife"}}
"""Types that the domain's rules mention. Every problem must declare them."""


def read_problem(text: str, task: str) -> ALFWorldGame:
    """Parse an official problem file. task: the task in natural language, which the file lacks."""
    text = re.sub(r";[^\n]*", "", text)
    _, init_found, after_init = text.partition("(:init")
    facts, goal_found, goal = after_init.partition("(:goal")
    if not init_found or not goal_found:
        raise DataError("this is not an ALFWorld planning problem: it has no (:init …) or no (:goal …)")
    by_predicate: dict[str, list[list[str]]] = defaultdict(list)
    for predicate, arguments in _ATOM.findall(facts):
        by_predicate[predicate.lower()].append(arguments.lower().split())
    types = {argument.lower(): argument.removesuffix("Type") for argument in set(re.findall(r"\b\w+Type\b", text))}
    try:
        return _build_game(by_predicate, types, _read_goal(goal), task=task)
    except (KeyError, IndexError, ValueError) as error:
        raise DataError(f"this is not an ALFWorld planning problem: {type(error).__name__} {error}") from error


def _read_goal(text: str) -> ALFWorldGoal:
    atoms = [(predicate.lower(), arguments.split()) for predicate, arguments in _ATOM.findall(text)]
    kind = _TASK_TYPES.get(tuple(sorted(predicate for predicate, _ in atoms)))
    if kind is None:
        kinds = ", ".join(task_type.value for task_type in TaskType)
        raise DataError(f"this goal is none of the six task types {kinds}: {text.strip()!r:.200}")
    types = {(name, arguments[0]): arguments[1].removesuffix("Type") for name, arguments in atoms if len(arguments) > 1}
    if kind is TaskType.LOOK:
        variables = dict(atoms)
        thing, lamp = variables["holds"][1], variables["istoggled"][0]
        return ALFWorldGoal(kind, types["objecttype", thing], types["objecttype", lamp])
    inside = next(arguments for name, arguments in atoms if name == "inreceptacle")
    return ALFWorldGoal(kind, types["objecttype", inside[0]], types["receptacletype", inside[1]])


def _build_game(
    facts: Mapping[str, list[list[str]]], types: Mapping[str, str], goal: ALFWorldGoal, *, task: str
) -> ALFWorldGame:
    """The game with these facts, given as argument lists by predicate. types: names of types by lowercase name."""
    names = _number_entities({argument for atoms in facts.values() for atom in atoms for argument in atom})
    located = ("atlocation", "receptacleatlocation", "objectatlocation")
    known_places = {atom[1] for predicate in located for atom in facts.get(predicate, ())}
    places = {location: number for number, location in enumerate(sorted(known_places))}

    def relation(predicate: str) -> dict[str, list[str]]:
        """A binary predicate: by first argument, the distinct second arguments in order."""
        related: dict[str, list[str]] = defaultdict(list)
        for first, second in sorted(facts.get(predicate, ())):
            if second not in related[first]:
                related[first].append(second)
        return related

    def entities_with(predicate: str) -> set[str]:
        return {atom[0] for atom in facts.get(predicate, ())}

    def single(names: list[str], name: str) -> str | None:
        if len(names) > 1:
            raise ValueError(f"{name} has several types or places")
        return names[0] if names else None

    (_, start), *other_players = facts["atlocation"]
    if other_players:
        raise ValueError("there must be one player")
    fits: dict[str, set[str]] = defaultdict(set)
    for receptacle, thing in facts.get("cancontain", ()):
        fits[types[receptacle]].add(types[thing])

    at, type_of = relation("receptacleatlocation"), relation("receptacletype")
    openable, opened = entities_with("openable"), entities_with("opened")
    receptacles = []
    for name in sorted({*type_of, *at}):
        location, type_ = single(at[name], name), single(type_of[name], name)
        receptacles.append(
            Receptacle(
                name=names[name],
                type=types[type_] if type_ else "",
                at=None if location is None else places[location],
                openable=name in openable,
                opened=name in opened,
            )
        )

    inside, at, type_of = relation("inreceptacle"), relation("objectatlocation"), relation("objecttype")
    traits = {trait: entities_with(predicate) for predicate, trait in _TRAITS.items()}
    holds: dict[str, list[str]] = defaultdict(list)
    for inner, outer in sorted(facts.get("inreceptacleobject", ())):
        holds[outer].append(names[inner])
    things = []
    for name in sorted({*type_of, *inside, *at}):
        type_ = single(type_of[name], name)
        things.append(
            Thing(
                name=names[name],
                type=types[type_] if type_ else "",
                inside=tuple(names[container] for container in inside[name]),
                at=tuple(places[location] for location in at[name]),
                traits=frozenset(trait for trait, entities in traits.items() if name in entities),
                holds=tuple(holds[name]),
            )
        )
    return ALFWorldGame(
        task=task,
        goal=goal,
        start=places[start],
        receptacles=tuple(receptacles),
        things=tuple(things),
        fits={name: frozenset(thing_types) for name, thing_types in sorted(fits.items())},
    )


def _number_entities(entities: set[str]) -> dict[str, str]:
    """Player-visible names: the part before the coordinates, counted down in alphabetical order."""
    words = {entity: entity.partition("_bar_")[0] + ("basin" if "basin" in entity else "") for entity in entities}
    left = Counter(word for entity, word in words.items() if "_bar_" in entity)
    names = {}
    for entity in sorted(entities):
        if "_bar_" in entity:
            names[entity] = f"{words[entity]} {left[words[entity]]}"
            left[words[entity]] -= 1
    return names


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


def make_identifier(name: str, number: int) -> str:
    """The PDDL identifier of a name; identifiers sort by `number` within a type."""
    word = name.rpartition(" ")[0]
    return f"{word.removesuffix('basin')}_bar_{number:04}" + ("_bar_basin" if word.endswith("basin") else "")


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
