"""Reads the PDDL problems of the official games."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping

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


def make_identifier(name: str, number: int) -> str:
    """The PDDL identifier of a name; identifiers sort by `number` within a type."""
    word = name.rpartition(" ")[0]
    return f"{word.removesuffix('basin')}_bar_{number:04}" + ("_bar_basin" if word.endswith("basin") else "")
