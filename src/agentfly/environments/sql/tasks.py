"""SQL tasks: generated questions, each with its gold query, and the questions of Spider.

A generated question is used only if its result is not empty and differs on a twin of the database. Its text decides its
split, so no question is in two splits, whatever the seeds.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

from agentfly.environments.data import (
    DatasetSource,
    belongs_to,
    in_dataset_split,
    read_rows,
    validate_count,
    validate_split,
)
from agentfly.environments.sql.database import Database, equal_rows, has_order_by
from agentfly.environments.sql.generator import LEVELS, TWINS, DatabaseSchema, Table, build_database, draw_schema
from agentfly.errors import DataError

KINDS = {
    1: ("which", "fact", "how_many", "aggregate", "top"),
    2: ("both", "group", "having", "nested", "join", "join_count"),
    3: ("nested", "join", "each", "without", "met", "total"),
}
"""Kinds of questions by level."""
QUESTIONS_PER_DATABASE = 4
_MAX_ROWS = 20
_ATTEMPTS = 40
_AGGREGATES = {"average": "AVG", "highest": "MAX", "lowest": "MIN", "total": "SUM"}
_COMPARISONS = (("above", ">"), ("below", "<"))
_JOIN_KINDS = {"join", "join_count", "each", "without", "met", "total"}
SPIDER = DatasetSource("Spider", "https://yale-lily.github.io/spider", "spider")
_SPIDER_TRAIN, _SPIDER_DEV = ("train_spider.json",), ("questions.json", "dev.json")


class QuestionSampler:
    """Draws questions about one generated database, as pairs of question and gold query."""

    def __init__(self, random: Random, schema: DatabaseSchema, database: Database) -> None:
        self._random, self._schema, self._database = random, schema, database

    def draw(self, kind: str) -> tuple[str, str]:
        """Draw a question of a kind."""
        return self._draw_join(kind) if kind in _JOIN_KINDS else self._draw_single(kind)

    def _draw_column(self, table: Table, is_text: bool) -> tuple[str, str]:
        """Draw a column of words or of integers: its name in questions, and in the database."""
        column, name = self._random.choice(table.columns_of(is_text))
        return column.phrase, name

    def _draw_value(self, table: Table, column: str) -> Any:
        rows = self._database.run(f"SELECT {column} FROM {table.name}", 1000).rows
        return self._random.choice(rows)[0]

    def _draw_condition(self, table: Table, exclude: str = "") -> tuple[str, str]:
        """Draw a condition on a column other than `exclude`, as text and SQL; at level 1 on text columns only."""
        is_single = len(self._schema.tables) == 1
        candidates = table.columns_of(is_text=True) if is_single else table.columns
        about, name = self._random.choice([candidate for candidate in candidates if candidate[1] != exclude])
        value = self._draw_value(table, name)
        column = name if is_single else f"{table.name}.{name}"
        if about.is_text:
            return f"whose {about.phrase} is {value}", f"{column} = '{value}'"
        word, sign = self._random.choice(_COMPARISONS)
        return f"whose {about.phrase} is {word} {value}", f"{column} {sign} {value}"

    def _draw_single(self, kind: str) -> tuple[str, str]:
        """Draw a question about one table."""
        random, table = self._random, self._random.choice(self._schema.tables)
        name, label, many = table.name, table.label, table.entity.many
        match kind:
            case "which":
                text, sql = self._draw_condition(table)
                return f"Name the {many} {text}.", f"SELECT {label} FROM {name} WHERE {sql}"
            case "fact":
                phrase, column = self._draw_column(table, random.choice((True, False)))
                value = self._draw_value(table, label)
                question = f"What is the {phrase} of the {table.entity.one} {value}?"
                return question, f"SELECT {column} FROM {name} WHERE {label} = '{value}'"
            case "how_many":
                text, sql = self._draw_condition(table)
                return f"How many {many} are there {text}?", f"SELECT COUNT(*) FROM {name} WHERE {sql}"
            case "aggregate":
                phrase, column = self._draw_column(table, is_text=False)
                # Not on the same column: the highest of those above 7 is the highest of all.
                text, sql = self._draw_condition(table, exclude=column)
                word, function = random.choice(list(_AGGREGATES.items()))
                question = f"What is the {word} {phrase} of the {many} {text}?"
                return question, f"SELECT {function}({column}) FROM {name} WHERE {sql}"
            case "top":
                number = random.randint(2, 5)
                phrase, column = self._draw_column(table, is_text=False)
                word, order = random.choice((("highest", " DESC"), ("lowest", "")))
                question = f"Name the {number} {many} with the {word} {phrase}, the {word} first."
                return question, f"SELECT {label} FROM {name} ORDER BY {column}{order} LIMIT {number}"
            case "both":
                (text, sql), (other_text, other) = self._draw_condition(table), self._draw_condition(table)
                question = f"How many {many} are there {text} and {other_text}?"
                return question, f"SELECT COUNT(*) FROM {name} WHERE {sql} AND {other}"
            case "group":
                phrase, column = self._draw_column(table, is_text=True)
                question = f"How many {many} are there of each {phrase}? Give the {phrase} and the number."
                return question, f"SELECT {column}, COUNT(*) FROM {name} GROUP BY {column}"
            case "having":
                number = random.randint(1, 6)
                phrase, column = self._draw_column(table, is_text=True)
                question = f"Which {phrase} do more than {number} {many} share? Give each once."
                return question, f"SELECT {column} FROM {name} GROUP BY {column} HAVING COUNT(*) > {number}"
            case _:  # nested
                phrase, column = self._draw_column(table, is_text=False)
                word, sign = random.choice(_COMPARISONS)
                question = f"Name the {many} whose {phrase} is {word} the average of all {many}."
                average = f"(SELECT AVG({column}) FROM {name})"
                return question, f"SELECT {label} FROM {name} WHERE {column} {sign} {average}"

    def _draw_join(self, kind: str) -> tuple[str, str]:
        """Draw a question about several tables."""
        owner, item, *third_tables = self._schema.tables
        assert item.reference is not None
        key, items, owners = item.reference[0], item.entity.many, owner.entity.many
        join = f"FROM {item.name} JOIN {owner.name} ON {item.name}.{key} = {owner.name}.id"
        match kind:
            case "join":
                text, sql = self._draw_condition(owner)
                question = f"Name the {items} that belong to {owners} {text}."
                return question, f"SELECT {item.name}.{item.label} {join} WHERE {sql}"
            case "join_count":
                text, sql = self._draw_condition(item)
                name = self._draw_value(owner, owner.label)
                question = f"How many {items} {text} belong to the {owner.entity.one} {name}?"
                return question, f"SELECT COUNT(*) {join} WHERE {owner.name}.{owner.label} = '{name}' AND {sql}"
            case "each":
                question = (
                    f"How many {items} belong to each of the {owners} that have any? Give the name and the number."
                )
                return question, f"SELECT {owner.name}.{owner.label}, COUNT(*) {join} GROUP BY {owner.name}.id"
            case "without":
                text, sql = self._draw_condition(owner)
                question = f"Name the {owners} {text} that have no {items}."
                inner = f"(SELECT {key} FROM {item.name})"
                return question, f"SELECT {owner.label} FROM {owner.name} WHERE {sql} AND id NOT IN {inner}"
        # About deals, which relate visitors to items.
        (visitor,), domain = third_tables, self._schema.domain
        assert self._schema.deals is not None
        deals, item_column, visitor_column, number = self._schema.deals
        join = (
            f"FROM {deals} JOIN {item.name} ON {deals}.{item_column} = {item.name}.id "
            f"JOIN {visitor.name} ON {deals}.{visitor_column} = {visitor.name}.id"
        )
        if kind == "met":
            text, sql = self._draw_condition(item)
            question = f"Name the {visitor.entity.many} who have {domain.verb} {items} {text}. Give each once."
            return question, f"SELECT DISTINCT {visitor.name}.{visitor.label} {join} WHERE {sql}"
        text, sql = self._draw_condition(visitor)
        visitors = f"{visitor.entity.many} {text}"
        question = f"What is the total {domain.deal.phrase} of the {items} that {visitors} have {domain.verb}?"
        return question, f"SELECT SUM({deals}.{number}) {join} WHERE {sql}"


def draw_tasks(
    split: str = "train", count: int = 100, *, seed: int = 0, levels: Sequence[int] = LEVELS
) -> list[dict[str, Any]]:
    """Draw questions about generated databases: of one table (level 1), two (2) or four (3).

    The levels take turns, database by database.
    """
    validate_split(split)
    validate_count(count)
    if not isinstance(levels, Sequence) or not levels or any(level not in LEVELS for level in levels):
        raise DataError(f"levels are a list of {', '.join(map(str, LEVELS))}, not {levels!r:.80}")
    rows: list[dict[str, Any]] = []
    for database in itertools.count():
        if len(rows) >= count:
            break
        rows += _draw_questions(split, f"{split}-{seed}-{database}", levels[database % len(levels)])
    return [{"id": f"{split}-{seed}-{index}", **row} for index, row in enumerate(rows[:count])]


def _draw_questions(split: str, key: str, level: int) -> Iterator[dict[str, Any]]:
    """Yield at most QUESTIONS_PER_DATABASE rows about one database."""
    random, questions = Random(f"{key}/{level}/questions"), set[str]()
    copies = [Database(build_database(key, level, twin), seconds=10.0) for twin in range(TWINS + 1)]
    sampler = QuestionSampler(random, draw_schema(key, level), copies[0])
    try:
        for _ in range(_ATTEMPTS):
            kind = random.choice(KINDS[level])
            question, gold = sampler.draw(kind)
            if len(questions) == QUESTIONS_PER_DATABASE:
                return
            if question in questions or not belongs_to(question, split):
                continue
            # The result must be short, not empty, and another one on some twin: it cannot be guessed without a query.
            real, *twins = (copy.run(gold, _MAX_ROWS + 1).rows for copy in copies)
            if not 1 <= len(real) <= _MAX_ROWS or real in ([(0,)], [(None,)]):
                continue
            if all(equal_rows(real, twin, ordered=has_order_by(gold)) for twin in twins):
                continue
            questions.add(question)
            database = {"drawn": key, "level": level}
            yield {"question": question, "gold": gold, "kind": kind, "level": level, "database": database}
    finally:
        for copy in copies:
            copy.close()


def spider_tasks(split: str) -> list[dict[str, Any]]:
    """Read Spider, in its own format or that of InterCode, from the folder `spider` of AGENTFLY_DATA.

    Rows have `id`, `question`, `gold`, `kind` (its hardness) and `database`. Spider's dev set is the split `test`: its
    own test set was published late and is rarely used. One in twenty training databases, by the checksum of its name,
    is for validation with all its questions. Raises DataError if the file of a database is missing.
    """
    path = SPIDER.file(*(_SPIDER_DEV if validate_split(split) == "test" else _SPIDER_TRAIN))
    rows, names = list[dict[str, Any]](), set[str]()
    for number, (source_line, source) in enumerate(read_rows(path)):
        # In InterCode's format `query` is the question. In the authors' it is the gold query.
        keys = ("query", "gold", "db") if "gold" in source else ("question", "query", "db_id")
        question, gold, name = map(source.get, keys)
        if not all(isinstance(field, str) and field for field in (question, gold, name)):
            raise DataError(
                f"{source_line}: a row has query, gold and db, or question, query and db_id, not {source!r:.80}"
            )
        if in_dataset_split(str(name), split):
            row = {"id": f"spider/{split}/{number}", "question": question, "gold": gold}
            rows.append({**row, "kind": source.get("hardness", ""), "database": {"spider": name}})
            names.add(str(name))
    for name in names:
        spider_file(name)
    return rows


def spider_file(name: str) -> Path:
    """Path of a Spider database: `NAME.sqlite`, or its place in the authors' archive. Raises DataError."""
    if not name.replace("_", "").isalnum():
        raise DataError(f"{name!r:.80} is not the name of a Spider database")
    return SPIDER.file(f"{name}.sqlite", f"database/{name}/{name}.sqlite")
