"""What generated databases are about: a few small worlds, each of four tables that refer to one another.

Everything has several names that a table or column may go by, so that a question does not say what it is called in the
database. The words of the question are always the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

Words = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Text:
    """A column of words that several rows share."""

    said: str
    """What questions call it."""
    names: Words
    """What it may be called in the database."""
    values: Words


@dataclass(frozen=True, slots=True)
class Number:
    """A column of whole numbers, no two of them equal."""

    said: str
    names: Words
    values: range


@dataclass(frozen=True, slots=True)
class Entity:
    """What a table holds: things with a name."""

    one: str
    many: str
    tables: Words
    """What the table may be called."""
    naming: tuple[Words, Words]
    """A name is one of the first and one of the second."""
    called: Words
    """What the column with the name may be called."""
    texts: tuple[Text, ...]
    numbers: tuple[Number, ...]


@dataclass(frozen=True, slots=True)
class Domain:
    """An owner has items; a visitor meets items in deals."""

    owner: Entity
    item: Entity
    visitor: Entity
    deal: Number
    """What is known of a meeting of a visitor and an item."""
    deals: Words
    """What the table of meetings may be called."""
    met: str
    """What a visitor has done to an item: booked, borrowed, bought."""


@cache
def domains() -> tuple[Domain, ...]:
    """All of them, from the file beside this one."""
    import tomllib  # only who draws databases needs it

    read = tomllib.loads((resources.files(__package__) / "domains.toml").read_text(encoding="utf-8"))
    lists = {name: _words(words) for name, words in read["lists"].items()}
    naming = {name: (lists[first], lists[second]) for name, (first, second) in read["naming"].items()}
    return tuple(_domain(each, lists, naming) for each in read["domain"])


def _domain(read: dict[str, Any], lists: dict[str, Words], naming: dict[str, tuple[Words, Words]]) -> Domain:
    owner, item, visitor = (_entity(read[part], lists, naming) for part in ("owner", "item", "visitor"))
    return Domain(owner, item, visitor, _number(read["deal"]), _words(read["deals"]), read["met"])


def _entity(read: dict[str, Any], lists: dict[str, Words], naming: dict[str, tuple[Words, Words]]) -> Entity:
    return Entity(
        read["one"], read["many"], _words(read["tables"]), naming[read["naming"]], _words(read["called"]),
        tuple(_text(line, lists) for line in read["texts"]), tuple(map(_number, read["numbers"])),
    )  # fmt: skip


def _words(line: str) -> Words:
    return tuple(line.split())


def _text(line: str, lists: dict[str, Words]) -> Text:
    said, names, values = line.split(": ")
    return Text(said, _words(names), lists.get(values) or _words(values))


def _number(line: str) -> Number:
    said, names, values = line.split(": ")
    least, most = map(int, values.split("-"))
    return Number(said, _words(names), range(least, most + 1))
