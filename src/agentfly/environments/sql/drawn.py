"""Databases drawn by a seed: which tables there are and what they are called, and the rows.

A database has twins: the same tables under the same names with other rows. They are never shown; a query that is right
is right on them as well, and one that only spells out the answer is not.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from random import Random

from agentfly.environments.sql.database import built
from agentfly.environments.sql.domains import Domain, Entity, Number, Text, domains

LEVELS = (1, 2, 3)
"""One table, with names of one word; two, of which one refers to the other; four."""
ROWS = {1: (8, 12), 2: (10, 20), 3: (12, 30)}
TWINS = 3


@dataclass(frozen=True, slots=True)
class Table:
    """A table of the database, and what it is about."""

    entity: Entity
    name: str
    label: str
    """The column with the names."""
    columns: tuple[tuple[Text | Number, str], ...]
    """What is known of each, and the column that it is in."""
    refers: tuple[str, str] | None = None
    """The column that refers to another table, and that table; None where there is none."""

    def of(self, kind: type) -> list[tuple[Text | Number, str]]:
        """The columns of a kind."""
        return [each for each in self.columns if isinstance(each[0], kind)]


@dataclass(frozen=True, slots=True)
class Shape:
    """The tables of a database."""

    domain: Domain
    tables: tuple[Table, ...]
    """At most the owner, the item and the visitor, in this order."""
    deals: tuple[str, str, str, str] | None
    """The table of meetings, and its columns for item, visitor and number; None below level 3."""


def shape_of(key: str, level: int) -> Shape:
    """The tables that belong to a key."""
    random = Random(f"{key}/{level}/shape")
    domain = random.choice(domains())
    if level == 1:
        return Shape(domain, (_table(random, random.choice((domain.owner, domain.item, domain.visitor))),), None)
    owner = _table(random, domain.owner)
    item = _table(random, domain.item, (f"{domain.owner.one}_id", owner.name))
    if level == 2:
        return Shape(domain, (owner, item), None)
    visitor = _table(random, domain.visitor)
    number = random.choice(domain.deal.names)
    deals = (random.choice(domain.deals), f"{domain.item.one}_id", f"{domain.visitor.one}_id", number)
    return Shape(domain, (owner, item, visitor), deals)


def _table(random: Random, entity: Entity, refers: tuple[str, str] | None = None) -> Table:
    used = {label := random.choice(entity.called)}
    known: list[Text | Number] = [*entity.texts, *entity.numbers]
    columns = []
    for about in random.sample(known, len(known)):
        name = random.choice([each for each in about.names if each not in used])
        used.add(name)
        columns.append((about, name))
    return Table(entity, random.choice(entity.tables), label, tuple(columns), refers)


def image_of(key: str, level: int, twin: int = 0) -> bytes:
    """The database itself, or one of its twins."""
    shape, random = shape_of(key, level), Random(f"{key}/{level}/rows/{twin}")

    def fill(connection: sqlite3.Connection) -> None:
        sizes = {table.name: random.randint(*ROWS[level]) for table in shape.tables}
        for table in shape.tables:
            connection.execute(_created(table))
            rows = list(_rows(random, table, sizes, level))
            connection.executemany(f"INSERT INTO {table.name} VALUES ({', '.join('?' * len(rows[0]))})", rows)
        if shape.deals is not None:
            _fill_deals(connection, random, shape, sizes)

    return built(fill)


def _created(table: Table) -> str:
    columns = ["id INTEGER PRIMARY KEY", f"{table.label} TEXT"]
    columns += [f"{name} {'TEXT' if isinstance(about, Text) else 'INTEGER'}" for about, name in table.columns]
    if table.refers is not None:
        columns.append("{} INTEGER REFERENCES {}(id)".format(*table.refers))
    return f"CREATE TABLE {table.name} ({', '.join(columns)})"


def _rows(random: Random, table: Table, sizes: dict[str, int], level: int) -> Iterator[tuple[object, ...]]:
    size = sizes[table.name]
    columns: list[list[object]] = [list(range(1, size + 1))]
    names = [(first,) for first in table.entity.naming[0]] if level == 1 else list(product(*table.entity.naming))
    columns.append([" ".join(name) for name in random.sample(names, size)])
    for about, _ in table.columns:
        if isinstance(about, Text):
            few = random.sample(about.values, min(5, len(about.values)))
            columns.append(random.choices(few, k=size))
        else:
            columns.append(list(random.sample(about.values, size)))
    if table.refers is not None:
        some = random.sample(range(1, sizes[table.refers[1]] + 1), max(2, sizes[table.refers[1]] * 2 // 3))
        columns.append(list(random.choices(some, k=size)))
    return zip(*columns, strict=True)


def _fill_deals(connection: sqlite3.Connection, random: Random, shape: Shape, sizes: dict[str, int]) -> None:
    assert shape.deals is not None
    name, item, visitor, number = shape.deals
    _, items, visitors = shape.tables
    connection.execute(
        f"CREATE TABLE {name} (id INTEGER PRIMARY KEY, {item} INTEGER REFERENCES {items.name}(id), "
        f"{visitor} INTEGER REFERENCES {visitors.name}(id), {number} INTEGER)"
    )
    pairs = [(a, b) for a in range(1, sizes[items.name] + 1) for b in range(1, sizes[visitors.name] + 1)]
    met = random.sample(pairs, min(len(pairs), 40))
    numbers = random.sample(shape.domain.deal.values, len(met))
    rows = [(place, *pair, value) for place, (pair, value) in enumerate(zip(met, numbers, strict=True), 1)]
    connection.executemany(f"INSERT INTO {name} VALUES (?, ?, ?, ?)", rows)
