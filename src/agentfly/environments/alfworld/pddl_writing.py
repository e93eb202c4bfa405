"""Writes any game as a planning problem, which the official engine can play."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from agentfly.environments.alfworld.game import Game, Goal, Kind

_NAMED_BY_DOMAIN = {"rtype": {"Sink", "SinkBasin", "Microwave", "Fridge"}, "otype": {"Knife", "ButterKnife"}}
"""Types that the rules speak of, so every problem has to have them."""


def write_problem(game: Game) -> str:
    """The game as a planning problem; where it is read again, everything has the name it has here."""
    names = [each.name for each in game.receptacles] + [each.name for each in game.things]
    ids = {name: identifier(name, number) for number, name in enumerate(names)}
    declared = {
        "agent": ["player"],
        "location": sorted({*(f"loc_bar_{number}" for number in _places(game))}),
        "receptacle": [ids[each.name] for each in game.receptacles],
        "object": [ids[each.name] for each in game.things],
        "rtype": _types(game, "rtype"),
        "otype": _types(game, "otype"),
    }
    objects = [f"{name} - {kind}" for kind, names in declared.items() for name in names]
    facts = [f"(atLocation player loc_bar_{game.start})", *_receptacle_facts(game, ids), *_thing_facts(game, ids)]
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

    def there(variable: str) -> str:
        typed = f"(objectType {variable} {goal.thing}Type) (receptacleType ?r {goal.target}Type)"
        return f"(inReceptacle {variable} ?r) {typed}"

    treated = "".join(f"({predicate} ?o) " for predicate in goal.kind.needs or ())
    if goal.kind is not Kind.PLACE_TWO:
        return f"(exists (?r - receptacle) (exists (?o - object) (and {treated}{there('?o')})))"
    both = f"(not (= ?o ?p)) {there('?o')} {there('?p')}"
    return f"(exists (?r - receptacle ?o - object ?p - object) (and {both}))"


def _lines(parts: Iterable[str]) -> str:
    return "\n".join(parts)
