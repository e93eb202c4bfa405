"""HotpotQA and 2WikiMultihopQA, from the files that their authors publish, in the folder `retrieval` of AGENTFLY_DATA.

Rows have `question`, `answer`, `kind`, `titles` (of the passages that it takes) and, where the file has them, the
`passages` that are searched. The published test sets have no answers, so `dev` is the test here, and every twentieth
question for training, chosen by its letters, is for validation.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentfly.environments.data import Source, read_rows, validate_split
from agentfly.environments.search.passages import Passage, read_corpus
from agentfly.errors import DataError


@dataclass(frozen=True, slots=True)
class _Questions:
    """The files of a data set."""

    source: Source
    train: tuple[str, ...]
    """Names that the file may have, the best one first."""
    dev: tuple[str, ...]


FOLDER = "retrieval"
HOTPOTQA = _Questions(
    Source("HotpotQA", "https://hotpotqa.github.io", FOLDER),
    ("hotpot_train_v1.1.json",),
    ("hotpot_dev_distractor_v1.json", "hotpotqa_closed_60.json", "hotpotqa_dev_pairs.json"),
)
TWO_WIKI = _Questions(
    Source("2WikiMultihopQA", "https://github.com/Alab-NII/2wikimultihop", FOLDER),
    ("2wiki_train.json", "2wikimultihop/train.json"),
    ("2wiki_dev.json", "2wikimultihop/dev.json"),
)


def hotpotqa_tasks(split: str, *, file: str | None = None) -> list[dict[str, Any]]:
    """The questions of HotpotQA. `file` is read instead of the best one there is."""
    return _tasks(HOTPOTQA, split, file)


def two_wiki_tasks(split: str, *, file: str | None = None) -> list[dict[str, Any]]:
    """The questions of 2WikiMultihopQA."""
    return _tasks(TWO_WIKI, split, file)


def two_wiki_passages() -> list[Passage]:
    """A corpus of Wikipedia passages, six thousand, for questions of 2WikiMultihopQA: rows with title and text."""
    return list(read_corpus(TWO_WIKI.source.file("2wiki_passages.json")))


def _tasks(asked: _Questions, split: str, file: str | None) -> list[dict[str, Any]]:
    validate_split(split)
    names = (file,) if file is not None else asked.dev if split == "test" else asked.train
    rows = [_row(row, place) for place, row in read_rows(asked.source.file(*names))]
    if split == "test":
        return rows
    return [row for row in rows if (zlib.crc32(row["question"].encode()) % 20 == 0) == (split == "validation")]


def _row(row: dict[str, Any], place: str) -> dict[str, Any]:
    if not all(isinstance(row.get(name), str) for name in ("question", "answer")):
        raise DataError(f"{place}: a row has the texts question and answer, not {row!r:.80}")
    out = {"question": row["question"], "answer": row["answer"], "kind": row.get("type", "")}
    if "_id" in row or "id" in row:
        out["id"] = str(row.get("_id", row.get("id")))
    try:
        if row.get("supporting_facts"):
            out["titles"] = list(dict.fromkeys(title for title, _ in _pairs(row["supporting_facts"], "sent_id")))
        if row.get("context"):
            texts = _pairs(row["context"], "sentences")
            out["passages"] = [{"title": title, "text": "".join(map(str, said)).strip()} for title, said in texts]
    except (TypeError, ValueError, KeyError) as error:
        raise DataError(f"{place}: its context or supporting facts have a shape that is not known: {error!r}") from None
    return out


def _pairs(value: Any, second: str) -> list[tuple[str, Any]]:
    """A list of pairs, as the authors have it; or two lists, as the copy on the hub has it."""
    if isinstance(value, str | bytes):
        value = json.loads(value)
    if isinstance(value, Mapping):
        return list(zip(value["title"], value[second], strict=True))
    return [(title, other) for title, other in value]
