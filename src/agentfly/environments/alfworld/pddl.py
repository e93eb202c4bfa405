"""Reads the planning problems that the official games are."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from agentfly.environments.alfworld.game import TRAITS, Game, Goal, Kind, Receptacle, Thing
from agentfly.errors import DataError

_ATOM = re.compile(r"\(([\w=-]+)\s+([^()]*)\)")
_TRAITS = {trait.lower(): trait for trait in TRAITS}
_SIGNATURES: dict[Kind, str] = {
    Kind.PLACE: "inreceptacle objecttype receptacletype",
    Kind.LOOK: "objecttype objecttype toggleable istoggled receptacleatlocation atlocation inreceptacle holds",
    Kind.CLEAN: "inreceptacle objecttype receptacletype cleanable isclean",
    Kind.HEAT: "inreceptacle objecttype receptacletype heatable ishot",
    Kind.COOL: "inreceptacle objecttype receptacletype coolable iscool",
    Kind.PLACE_TWO: "inreceptacle inreceptacle objecttype objecttype receptacletype receptacletype =",
}
"""Which predicates a goal of each kind is a conjunction of."""
_KINDS = {tuple(sorted(signature.split())): kind for kind, signature in _SIGNATURES.items()}


def read_problem(text: str, task: str) -> Game:
    """The game of an official problem file; `task` is the task in words, which the file does not have."""
    text = re.sub(r";[^\n]*", "", text)
    _, found, rest = text.partition("(:init")
    facts, goal_found, goal = rest.partition("(:goal")
    if not found or not goal_found:
        raise DataError("this is no planning problem of the household: it has no (:init …) or no (:goal …)")
    by_predicate: dict[str, list[list[str]]] = defaultdict(list)
    for predicate, arguments in _ATOM.findall(facts):
        by_predicate[predicate.lower()].append(arguments.lower().split())
    types = {argument.lower(): argument.removesuffix("Type") for argument in set(re.findall(r"\w+Type\b", text))}
    try:
        return _Reading(by_predicate, types).game(_goal(goal), task)
    except (KeyError, IndexError, ValueError) as error:
        raise DataError(f"this planning problem is not of the household: {type(error).__name__} {error}") from error


def _goal(text: str) -> Goal:
    atoms = [(predicate.lower(), arguments.split()) for predicate, arguments in _ATOM.findall(text)]
    kind = _KINDS.get(tuple(sorted(predicate for predicate, _ in atoms)))
    if kind is None:
        raise DataError(f"this goal is none of the six kinds {', '.join(k.value for k in Kind)}: {text.strip()!r:.200}")
    types = {(name, arguments[0]): arguments[1].removesuffix("Type") for name, arguments in atoms if len(arguments) > 1}
    if kind is Kind.LOOK:
        variables = dict(atoms)
        return Goal(kind, types["objecttype", variables["holds"][1]], types["objecttype", variables["istoggled"][0]])
    inside = next(arguments for name, arguments in atoms if name == "inreceptacle")
    return Goal(kind, types["objecttype", inside[0]], types["receptacletype", inside[1]])


class _Reading:
    """The facts of a problem on their way to a game."""

    def __init__(self, facts: Mapping[str, list[list[str]]], types: Mapping[str, str]) -> None:
        self.facts, self.types = facts, types
        self.names = _names({argument for atoms in facts.values() for atom in atoms for argument in atom})
        self.places = {place: number for number, place in enumerate(sorted(self._places()))}

    def _places(self) -> set[str]:
        predicates = ("atlocation", "receptacleatlocation", "objectatlocation")
        return {atom[1] for predicate in predicates for atom in self.facts.get(predicate, ())}

    def _all(self, predicate: str) -> dict[str, list[str]]:
        """By the first argument: the second ones, in order."""
        found: dict[str, list[str]] = defaultdict(list)
        for first, second in sorted(self.facts.get(predicate, ())):
            if second not in found[first]:
                found[first].append(second)
        return found

    def _true_of(self, predicate: str) -> set[str]:
        return {atom[0] for atom in self.facts.get(predicate, ())}

    def game(self, goal: Goal, task: str) -> Game:
        (_, start), *others = self.facts["atlocation"]
        if others:
            raise ValueError("there must be one player")
        fits: dict[str, set[str]] = defaultdict(set)
        for receptacle, thing in self.facts.get("cancontain", ()):
            fits[self.types[receptacle]].add(self.types[thing])
        frozen = {name: frozenset(things) for name, things in sorted(fits.items())}
        return Game(task, goal, self.places[start], tuple(self._receptacles()), tuple(self._things()), frozen)

    def _receptacles(self) -> Iterable[Receptacle]:
        at, openable, opened = self._all("receptacleatlocation"), self._true_of("openable"), self._true_of("opened")
        types = self._all("receptacletype")
        for name in sorted({*types, *at}):
            place, type_ = self._one(at[name], name), self._one(types[name], name)
            where = None if place is None else self.places[place]
            yield Receptacle(
                self.names[name], self.types[type_] if type_ else "", where, name in openable, name in opened
            )

    def _things(self) -> Iterable[Thing]:
        inside, at = self._all("inreceptacle"), self._all("objectatlocation")
        holds: dict[str, list[str]] = defaultdict(list)
        for inner, outer in sorted(self.facts.get("inreceptacleobject", ())):
            holds[outer].append(self.names[inner])
        traits = {trait: self._true_of(predicate) for predicate, trait in _TRAITS.items()}
        types = self._all("objecttype")
        for name in sorted({*types, *inside, *at}):
            type_ = self._one(types[name], name)
            own = frozenset(trait for trait, those in traits.items() if name in those)
            receptacles = tuple(self.names[each] for each in inside[name])
            places = tuple(self.places[each] for each in at[name])
            kind = self.types[type_] if type_ else ""
            yield Thing(self.names[name], kind, receptacles, places, own, tuple(holds[name]))

    def _one(self, found: list[str], name: str) -> str | None:
        if len(found) > 1:
            raise ValueError(f"{name} has several types or places")
        return found[0] if found else None


def _names(entities: set[str]) -> dict[str, str]:
    """What the player reads for each: the part before the coordinates, counted down in alphabetical order."""
    words = {entity: entity.partition("_bar_")[0] + ("basin" if "basin" in entity else "") for entity in entities}
    left = Counter(word for entity, word in words.items() if "_bar_" in entity)
    names = {}
    for entity in sorted(entities):
        if "_bar_" in entity:
            names[entity] = f"{words[entity]} {left[words[entity]]}"
            left[words[entity]] -= 1
    return names
