"""Spider, from the files of its authors or in the form of InterCode, in the folder `spider` of AGENTFLY_DATA.

Spider's own test set came late and is rarely used, so its `dev` is the test here. Of the databases for training, one in
twenty, chosen by its letters, is for validation with all its questions: no database is in two splits.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

from agentfly.environments.data import Source, read_rows, validate_split
from agentfly.errors import DataError

SPIDER = Source("Spider", "https://yale-lily.github.io/spider", "spider")
_FILES = {"train": ("train_spider.json",), "validation": ("train_spider.json",), "test": ("questions.json", "dev.json")}


def spider_tasks(split: str) -> list[dict[str, Any]]:
    """The questions of a split: rows with `id`, `question`, `gold`, `kind` (how hard it is) and `database`.

    Questions about databases whose file is not there are an error that names it.
    """
    path = SPIDER.file(*_FILES[validate_split(split)])
    rows = [_row(row, place, f"spider/{split}/{number}") for number, (place, row) in enumerate(read_rows(path))]
    if split != "test":
        rows = [row for row in rows if _is_held_out(row["database"]["spider"]) == (split == "validation")]
    for name in {row["database"]["spider"] for row in rows}:
        spider_file(name)
    return rows


def spider_file(name: str) -> Path:
    """The file of a database: `NAME.sqlite`, or where the authors' archive has it."""
    if not name.replace("_", "").isalnum():
        raise DataError(f"{name!r:.80} is no name of a database of Spider's")
    return SPIDER.file(f"{name}.sqlite", f"database/{name}/{name}.sqlite")


def _row(row: dict[str, Any], place: str, id: str) -> dict[str, Any]:
    intercode = "gold" in row  # there `query` is the question, and in the authors' files it is the answer
    question, gold, name = (row.get(key) for key in (("query", "gold", "db") if intercode else _OFFICIAL))
    if not all(isinstance(each, str) and each for each in (question, gold, name)):
        raise DataError(f"{place}: a row has query, gold and db, or question, query and db_id, not {row!r:.80}")
    return {"id": id, "question": question, "gold": gold, "kind": row.get("hardness", ""), "database": {"spider": name}}


_OFFICIAL = ("question", "query", "db_id")


def _is_held_out(name: str) -> bool:
    return zlib.crc32(name.encode()) % 20 == 0
