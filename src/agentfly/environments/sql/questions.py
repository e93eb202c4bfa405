"""Questions about drawn databases, each with a query that answers it.

A question is given out where its answer is not empty and is another one in a twin of the database. Its words decide
which split it belongs to, so no question is in two, whatever the seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from random import Random
from typing import Any

from agentfly.environments.data import validate_count, validate_split
from agentfly.environments.sql.database import Database, Row
from agentfly.environments.sql.domains import Number, Text
from agentfly.environments.sql.drawn import LEVELS, TWINS, Shape, Table, image_of, shape_of
from agentfly.environments.sql.results import orders, same
from agentfly.environments.task_sampling import belongs_to
from agentfly.errors import DataError

PER_DATABASE = 4
_MOST_ROWS = 20
_TRIES = 40
_AGGREGATES = {"average": "AVG", "highest": "MAX", "lowest": "MIN", "total": "SUM"}
Asked = tuple[str, str]
"""A question, and the query that answers it."""


class Draw:
    """The drawing of questions about one database."""

    def __init__(self, random: Random, shape: Shape, database: Database) -> None:
        self.random, self.shape, self._database = random, shape, database

    def table(self) -> Table:
        return self.random.choice(self.shape.tables)

    def column(self, table: Table, kind: type) -> tuple[str, str]:
        """What a column of a kind is called in questions, and in the database."""
        about, name = self.random.choice(table.of(kind))
        return about.said, name

    def value(self, table: Table, column: str) -> Any:
        rows = self._database.run(f"SELECT {column} FROM {table.name}", 1000).rows
        return self.random.choice(rows)[0]

    def condition(self, table: Table, but: str = "") -> Asked:
        """Something that holds for some rows, in words and in SQL; of a lone table only what needs no number.

        `but` is a column that it is not about.
        """
        alone = len(self.shape.tables) == 1
        known = table.of(Text) if alone else table.columns
        about, name = self.random.choice([each for each in known if each[1] != but])
        value, column = self.value(table, name), name if alone else f"{table.name}.{name}"
        if isinstance(about, Text):
            return f"whose {about.said} is {value}", f"{column} = '{value}'"
        word, sign = self.random.choice((("above", ">"), ("below", "<")))
        return f"whose {about.said} is {word} {value}", f"{column} {sign} {value}"


# ── one table ──


def which(draw: Draw) -> Asked:
    table = draw.table()
    words, sql = draw.condition(table)
    return f"Name the {table.entity.many} {words}.", f"SELECT {table.label} FROM {table.name} WHERE {sql}"


def fact(draw: Draw) -> Asked:
    table = draw.table()
    said, column = draw.column(table, draw.random.choice((Text, Number)))
    name = draw.value(table, table.label)
    question = f"What is the {said} of the {table.entity.one} {name}?"
    return question, f"SELECT {column} FROM {table.name} WHERE {table.label} = '{name}'"


def how_many(draw: Draw) -> Asked:
    table = draw.table()
    words, sql = draw.condition(table)
    return f"How many {table.entity.many} are there {words}?", f"SELECT COUNT(*) FROM {table.name} WHERE {sql}"


def aggregate(draw: Draw) -> Asked:
    table = draw.table()
    said, column = draw.column(table, Number)
    words, sql = draw.condition(table, but=column)  # the highest of those above 7 is the highest of all
    word, function = draw.random.choice(list(_AGGREGATES.items()))
    question = f"What is the {word} {said} of the {table.entity.many} {words}?"
    return question, f"SELECT {function}({column}) FROM {table.name} WHERE {sql}"


def top(draw: Draw) -> Asked:
    table, number = draw.table(), draw.random.randint(2, 5)
    said, column = draw.column(table, Number)
    word, order = draw.random.choice((("highest", " DESC"), ("lowest", "")))
    question = f"Name the {number} {table.entity.many} with the {word} {said}, the {word} first."
    return question, f"SELECT {table.label} FROM {table.name} ORDER BY {column}{order} LIMIT {number}"


def both(draw: Draw) -> Asked:
    table = draw.table()
    (words, sql), (more, other) = draw.condition(table), draw.condition(table)
    question = f"How many {table.entity.many} are there {words} and {more}?"
    return question, f"SELECT COUNT(*) FROM {table.name} WHERE {sql} AND {other}"


def group(draw: Draw) -> Asked:
    table = draw.table()
    said, column = draw.column(table, Text)
    question = f"How many {table.entity.many} are there of each {said}? Give the {said} and the number."
    return question, f"SELECT {column}, COUNT(*) FROM {table.name} GROUP BY {column}"


def having(draw: Draw) -> Asked:
    table, number = draw.table(), draw.random.randint(1, 6)
    said, column = draw.column(table, Text)
    question = f"Which {said} do more than {number} {table.entity.many} share? Give each once."
    return question, f"SELECT {column} FROM {table.name} GROUP BY {column} HAVING COUNT(*) > {number}"


def nested(draw: Draw) -> Asked:
    table = draw.table()
    said, column = draw.column(table, Number)
    word, sign = draw.random.choice((("above", ">"), ("below", "<")))
    question = f"Name the {table.entity.many} whose {said} is {word} the average of all {table.entity.many}."
    average = f"(SELECT AVG({column}) FROM {table.name})"
    return question, f"SELECT {table.label} FROM {table.name} WHERE {column} {sign} {average}"


# ── several ──


def _joined(draw: Draw) -> tuple[Table, Table, str]:
    owner, item = draw.shape.tables[:2]
    assert item.refers is not None
    return owner, item, f"FROM {item.name} JOIN {owner.name} ON {item.name}.{item.refers[0]} = {owner.name}.id"


def join(draw: Draw) -> Asked:
    owner, item, joined = _joined(draw)
    words, sql = draw.condition(owner)
    question = f"Name the {item.entity.many} that belong to {owner.entity.many} {words}."
    return question, f"SELECT {item.name}.{item.label} {joined} WHERE {sql}"


def join_count(draw: Draw) -> Asked:
    owner, item, joined = _joined(draw)
    words, sql = draw.condition(item)
    name = draw.value(owner, owner.label)
    question = f"How many {item.entity.many} {words} belong to the {owner.entity.one} {name}?"
    return question, f"SELECT COUNT(*) {joined} WHERE {owner.name}.{owner.label} = '{name}' AND {sql}"


def each(draw: Draw) -> Asked:
    owner, item, joined = _joined(draw)
    question = (
        f"How many {item.entity.many} belong to each of the {owner.entity.many} that have any? "
        "Give the name and the number."
    )
    return question, f"SELECT {owner.name}.{owner.label}, COUNT(*) {joined} GROUP BY {owner.name}.id"


def without(draw: Draw) -> Asked:
    owner, item, _ = _joined(draw)
    assert item.refers is not None
    words, sql = draw.condition(owner)
    question = f"Name the {owner.entity.many} {words} that have no {item.entity.many}."
    inner = f"(SELECT {item.refers[0]} FROM {item.name})"
    return question, f"SELECT {owner.label} FROM {owner.name} WHERE {sql} AND id NOT IN {inner}"


def _met(draw: Draw) -> tuple[Table, Table, str, str]:
    assert draw.shape.deals is not None
    name, item_column, visitor_column, number = draw.shape.deals
    _, item, visitor = draw.shape.tables
    joined = (
        f"FROM {name} JOIN {item.name} ON {name}.{item_column} = {item.name}.id "
        f"JOIN {visitor.name} ON {name}.{visitor_column} = {visitor.name}.id"
    )
    return item, visitor, f"{name}.{number}", joined


def met(draw: Draw) -> Asked:
    item, visitor, _, joined = _met(draw)
    words, sql = draw.condition(item)
    done = draw.shape.domain.met
    question = f"Name the {visitor.entity.many} who have {done} {item.entity.many} {words}. Give each once."
    return question, f"SELECT DISTINCT {visitor.name}.{visitor.label} {joined} WHERE {sql}"


def total(draw: Draw) -> Asked:
    item, visitor, number, joined = _met(draw)
    words, sql = draw.condition(visitor)
    said, done = draw.shape.domain.deal.said, draw.shape.domain.met
    question = f"What is the total {said} of the {item.entity.many} that {visitor.entity.many} {words} have {done}?"
    return question, f"SELECT SUM({number}) {joined} WHERE {sql}"


Family = Callable[[Draw], Asked]
FAMILIES: dict[int, tuple[Family, ...]] = {
    1: (which, fact, how_many, aggregate, top),
    2: (both, group, having, nested, join, join_count),
    3: (nested, join, each, without, met, total),
}
"""The kinds of questions of each level."""


def draw_tasks(split: str, number: int, seed: int, levels: Sequence[int]) -> list[dict[str, Any]]:
    """So many questions of a split, as rows of a data set."""
    validate_split(split)
    validate_count(number)
    if not isinstance(levels, Sequence) or not levels or any(level not in LEVELS for level in levels):
        raise DataError(f"levels are a list of {', '.join(map(str, LEVELS))}, not {levels!r:.80}")
    rows: list[dict[str, Any]] = []
    for database in count():
        if len(rows) >= number:
            break
        rows += _asked(split, f"{split}-{seed}-{database}", levels[database % len(levels)])
    return [{"id": f"{split}-{seed}-{place}", **row} for place, row in enumerate(rows[:number])]


def _asked(split: str, key: str, level: int) -> Iterator[dict[str, Any]]:
    random, asked = Random(f"{key}/{level}/questions"), set[str]()
    copies = [Database(image_of(key, level, twin), seconds=10.0) for twin in range(TWINS + 1)]
    draw = Draw(random, shape_of(key, level), copies[0])
    try:
        for _ in range(_TRIES):
            family = random.choice(FAMILIES[level])
            question, gold = family(draw)
            if len(asked) == PER_DATABASE:
                return
            if question in asked or not belongs_to(question, split) or not _telling(copies, gold):
                continue
            asked.add(question)
            database = {"drawn": key, "level": level}
            yield {"question": question, "gold": gold, "kind": family.__name__, "level": level, "database": database}
    finally:
        for copy in copies:
            copy.close()


def _telling(copies: Sequence[Database], gold: str) -> bool:
    """Whether there is an answer, not a long one, that nobody finds without a query."""
    real, *twins = (copy.run(gold, _MOST_ROWS + 1).rows for copy in copies)
    if not 1 <= len(real) <= _MOST_ROWS or _is_nothing(real):
        return False
    return any(not same(real, twin, ordered=orders(gold)) for twin in twins)


def _is_nothing(rows: list[Row]) -> bool:
    return rows in ([(0,)], [(None,)])
