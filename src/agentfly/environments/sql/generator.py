"""Databases generated from a seed: domains of four related tables, the names of tables and columns, and the rows.

Tables and columns have several possible names, so that a question does not reveal what they are called in the database;
the words of the question are always the same. Twins of a database have the same tables and names, and other rows.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from functools import cache
from itertools import product
from random import Random
from typing import Any

from agentfly.environments.data import load_toml
from agentfly.environments.sql.database import build_image

LEVELS = (1, 2, 3)
"""One table, with names of one word; two tables with a foreign key; four tables."""
ROWS = {1: (8, 12), 2: (10, 20), 3: (12, 30)}
"""Smallest and largest number of rows of a table, by level."""
TWINS = 3
"""Number of twins of a database."""
MAX_DEALS = 40
Words = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ColumnSpec:
    """A column of words that several rows share, or of distinct integers."""

    phrase: str
    """Name in questions."""
    names: Words
    """Possible names in the database."""
    values: Words | range

    @property
    def is_text(self) -> bool:
        return not isinstance(self.values, range)


@dataclass(frozen=True, slots=True)
class Entity:
    """What the rows of a table describe: things with a name."""

    one: str
    many: str
    tables: Words
    """Possible names of the table."""
    naming: tuple[Words, Words]
    """First and second words of names."""
    called: Words
    """Possible names of the column with the name."""
    columns: tuple[ColumnSpec, ...]


@dataclass(frozen=True, slots=True)
class Domain:
    """An owner has items; deals relate visitors to items."""

    owner: Entity
    item: Entity
    visitor: Entity
    deal: ColumnSpec
    """The number of a deal, such as its price."""
    deals: Words
    """Possible names of the table of deals."""
    verb: str
    """What a visitor has done to an item: booked, borrowed, bought."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table of a generated database."""

    entity: Entity
    name: str
    label: str
    """Name of the column with the names."""
    columns: tuple[tuple[ColumnSpec, str], ...]
    """Each column and its name."""
    reference: tuple[str, str] | None = None
    """Column with a foreign key, and the table that it refers to."""

    def columns_of(self, is_text: bool) -> list[tuple[ColumnSpec, str]]:
        """The columns of words, or those of integers."""
        return [column for column in self.columns if column[0].is_text == is_text]


@dataclass(frozen=True, slots=True)
class DatabaseSchema:
    """The tables of a generated database."""

    domain: Domain
    tables: tuple[Table, ...]
    """Those of owner, item and visitor, in this order, as far as the level has them."""
    deals: tuple[str, str, str, str] | None
    """Name of the table of deals, and of its columns for item, visitor and number. None below level 3."""


@cache
def load_domains() -> tuple[Domain, ...]:
    """Load all domains from `domains.toml`."""
    data = load_toml(__package__, "domains.toml")
    lists = {name: tuple(words.split()) for name, words in data["lists"].items()}

    def parse_column(line: str) -> ColumnSpec:
        phrase, names, values = line.split(": ")
        low, dash, high = values.partition("-")
        is_range = bool(dash) and low.isdecimal()
        numbers = range(int(low), int(high) + 1) if is_range else None
        return ColumnSpec(phrase, tuple(names.split()), numbers or lists.get(values) or tuple(values.split()))

    def parse_entity(entity: dict[str, Any]) -> Entity:
        first, second = data["naming"][entity["naming"]]
        return Entity(
            one=entity["one"],
            many=entity["many"],
            tables=tuple(entity["tables"].split()),
            naming=(lists[first], lists[second]),
            called=tuple(entity["called"].split()),
            columns=tuple(map(parse_column, [*entity["texts"], *entity["numbers"]])),
        )

    return tuple(
        Domain(
            **{role: parse_entity(domain[role]) for role in ("owner", "item", "visitor")},
            deal=parse_column(domain["deal"]),
            deals=tuple(domain["deals"].split()),
            verb=domain["verb"],
        )
        for domain in data["domain"]
    )


def draw_schema(key: str, level: int) -> DatabaseSchema:
    """Draw the tables of a database."""
    random = Random(f"{key}/{level}/shape")

    def draw_table(entity: Entity, reference: tuple[str, str] | None = None) -> Table:
        used = {label := random.choice(entity.called)}
        columns = []
        for column in random.sample(entity.columns, len(entity.columns)):
            name = random.choice([candidate for candidate in column.names if candidate not in used])
            used.add(name)
            columns.append((column, name))
        return Table(entity, random.choice(entity.tables), label, columns=tuple(columns), reference=reference)

    domain = random.choice(load_domains())
    if level == 1:
        entity = random.choice((domain.owner, domain.item, domain.visitor))
        return DatabaseSchema(domain, (draw_table(entity),), None)
    owner = draw_table(domain.owner)
    item = draw_table(domain.item, (f"{domain.owner.one}_id", owner.name))
    if level == 2:
        return DatabaseSchema(domain, (owner, item), None)
    visitor = draw_table(domain.visitor)
    number = random.choice(domain.deal.names)
    deals = (random.choice(domain.deals), f"{domain.item.one}_id", f"{domain.visitor.one}_id", number)
    return DatabaseSchema(domain, (owner, item, visitor), deals)


def build_database(key: str, level: int, twin: int = 0) -> bytes:
    """Build the image of a database, or of one of its twins."""
    schema, random = draw_schema(key, level), Random(f"{key}/{level}/rows/{twin}")
    sizes = {table.name: random.randint(*ROWS[level]) for table in schema.tables}

    def fill_table(connection: sqlite3.Connection, table: Table) -> None:
        size = sizes[table.name]
        definitions = ["id INTEGER PRIMARY KEY", f"{table.label} TEXT"]
        first_names, second_names = table.entity.naming
        names = list(first_names) if level == 1 else [" ".join(pair) for pair in product(first_names, second_names)]
        values: list[list[Any]] = [list(range(1, size + 1)), random.sample(names, size)]
        for column, name in table.columns:
            definitions.append(f"{name} {'TEXT' if column.is_text else 'INTEGER'}")
            # Few different words, so that several rows share one.
            few = random.sample(column.values, min(5, len(column.values)) if column.is_text else size)
            values.append(random.choices(few, k=size) if column.is_text else few)
        if table.reference is not None:
            name, target = table.reference
            definitions.append(f"{name} INTEGER REFERENCES {target}(id)")
            # Only some rows of the target are referred to, so that questions for rows without any have answers.
            some = random.sample(range(1, sizes[target] + 1), max(2, sizes[target] * 2 // 3))
            values.append(random.choices(some, k=size))
        connection.execute(f"CREATE TABLE {table.name} ({', '.join(definitions)})")
        insert = f"INSERT INTO {table.name} VALUES ({', '.join('?' * len(values))})"
        connection.executemany(insert, zip(*values, strict=True))

    def fill(connection: sqlite3.Connection) -> None:
        for table in schema.tables:
            fill_table(connection, table)
        if schema.deals is None:
            return
        name, item, visitor, number = schema.deals
        _, items, visitors = schema.tables
        connection.execute(
            f"CREATE TABLE {name} (id INTEGER PRIMARY KEY, {item} INTEGER REFERENCES {items.name}(id), "
            f"{visitor} INTEGER REFERENCES {visitors.name}(id), {number} INTEGER)"
        )
        pairs = list(product(range(1, sizes[items.name] + 1), range(1, sizes[visitors.name] + 1)))
        chosen = random.sample(pairs, min(len(pairs), MAX_DEALS))
        numbers = random.sample(schema.domain.deal.values, len(chosen))
        rows = [(row_id, *pair, value) for row_id, (pair, value) in enumerate(zip(chosen, numbers, strict=True), 1)]
        connection.executemany(f"INSERT INTO {name} VALUES (?, ?, ?, ?)", rows)

    return build_image(fill)
