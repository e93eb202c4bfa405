"""Games as planning problems: reads the official files, and writes any game as one that the official engine takes."""

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
    before, found, rest = text.partition("(:init")
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


# ── writing ──

_NAMED_BY_DOMAIN = {"rtype": {"Sink", "SinkBasin", "Microwave", "Fridge"}, "otype": {"Knife", "ButterKnife"}}
"""Types that the rules speak of, so every problem has to have them."""


def write_problem(game: Game) -> str:
    """The game as a planning problem; where it is read again, everything has the name it has here."""
    ids = {each.name: identifier(each.name, number) for number, each in enumerate((*game.receptacles, *game.things))}
    declared = {
        "agent": ["player"],
        "location": sorted({*(f"loc_bar_{number}" for number in _places(game))}),
        "receptacle": [ids[each.name] for each in game.receptacles],
        "object": [ids[each.name] for each in game.things],
        "rtype": _types(game, "rtype"),
        "otype": _types(game, "otype"),
    }
    objects = [f"{name} - {kind}" for kind, names in declared.items() for name in names]
    facts = ["(atLocation player loc_bar_%d)" % game.start, *_receptacle_facts(game, ids), *_thing_facts(game, ids)]
    facts += [f"(canContain {r}Type {t}Type)" for r, types in game.fits.items() for t in sorted(types)]
    parts = (f"(:objects {_lines(objects)})", f"(:init {_lines(facts)})", f"(:goal (and {_goal_text(game.goal)}))")
    return f"(define (problem household) (:domain alfred)\n{_lines(parts)})\n"


def identifier(name: str, number: int) -> str:
    """What a planning problem calls it. `number` grows in the order of listing."""
    word = name.rpartition(" ")[0]
    return f"{word.removesuffix('basin')}_bar_{number:04}" + ("_bar_basin" if word.endswith("basin") else "")


def _places(game: Game) -> set[int]:
    things = {place for thing in game.things for place in thing.at}
    return {game.start} | things | {each.at for each in game.receptacles if each.at is not None}


def _types(game: Game, kind: str) -> list[str]:
    own = {each.type for each in (game.receptacles if kind == "rtype" else game.things)}
    fitting = set(game.fits) if kind == "rtype" else {type_ for types in game.fits.values() for type_ in types}
    asked = {game.goal.target} if (kind == "rtype") == (game.goal.kind is not Kind.LOOK) else set()
    asked |= {game.goal.thing} if kind == "otype" else set()
    return [f"{name}Type" for name in sorted((own | fitting | asked | _NAMED_BY_DOMAIN[kind]) - {""})]


def _receptacle_facts(game: Game, ids: Mapping[str, str]) -> Iterable[str]:
    for each in game.receptacles:
        if each.type:
            yield f"(receptacleType {ids[each.name]} {each.type}Type)"
        if each.at is not None:
            yield f"(receptacleAtLocation {ids[each.name]} loc_bar_{each.at})"
        for trait in ("openable", "opened"):
            if getattr(each, trait):
                yield f"({trait} {ids[each.name]})"


def _thing_facts(game: Game, ids: Mapping[str, str]) -> Iterable[str]:
    for each in game.things:
        name = ids[each.name]
        if each.type:
            yield f"(objectType {name} {each.type}Type)"
        yield from (f"({trait} {name})" for trait in sorted(each.traits))
        yield from (f"(inReceptacle {name} {ids[receptacle]})" for receptacle in each.inside)
        yield from (f"(objectAtLocation {name} loc_bar_{place})" for place in each.at)
        yield from (f"(inReceptacleObject {ids[inner]} {name})" for inner in each.holds)


def _goal_text(goal: Goal) -> str:
    if goal.kind is Kind.LOOK:
        lamp = f"(objectType ?lamp {goal.target}Type) (toggleable ?lamp) (isToggled ?lamp) (inReceptacle ?lamp ?r)"
        lit = f"(receptacleAtLocation ?r ?l) (atLocation ?a ?l) {lamp}"
        return (
            f"(exists (?lamp - object ?r - receptacle ?a - agent ?l - location) (and {lit}))"
            f"(exists (?o - object ?b - agent) (and (objectType ?o {goal.thing}Type) (holds ?b ?o)))"
        )
    there = "(inReceptacle {0} ?r) (objectType {0} %sType) (receptacleType ?r %sType)" % (goal.thing, goal.target)
    treated = "".join(f"({predicate} ?o) " for predicate in goal.kind.needs or ())
    if goal.kind is not Kind.PLACE_TWO:
        return f"(exists (?r - receptacle) (exists (?o - object) (and {treated}{there.format('?o')})))"
    both = f"(not (= ?o ?p)) {there.format('?o')} {there.format('?p')}"
    return f"(exists (?r - receptacle ?o - object ?p - object) (and {both}))"


def _lines(parts: Iterable[str]) -> str:
    return "\n".join(parts)
