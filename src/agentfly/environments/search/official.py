"""HotpotQA and 2WikiMultihopQA, from the files that their authors publish, in the folder `retrieval` of AGENTFLY_DATA.

Rows have `question`, `answer`, `kind`, `titles` (of the passages that it takes) and, where the file has them, the
`passages` that are searched. The published test sets have no answers, so `dev` is the test here, and every twentieth
question for training, chosen by its letters, is for validation.
"""

from __future__ import annotations

import gzip
import json
import lzma
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentfly.environments.search.encyclopaedia import SPLITS
from agentfly.environments.search.passages import Passage, read_corpus
from agentfly.errors import ConfigError, DataError

_PACKED = ("", ".xz", ".gz")
_OPENERS: dict[str, Any] = {".xz": lzma.open, ".gz": gzip.open}


@dataclass(frozen=True, slots=True)
class _Source:
    """A data set, and where it comes from."""

    name: str
    address: str
    train: tuple[str, ...]
    """Names that the file may have, the best one first."""
    dev: tuple[str, ...]


HOTPOTQA = _Source(
    "HotpotQA",
    "https://hotpotqa.github.io",
    ("hotpot_train_v1.1.json",),
    ("hotpot_dev_distractor_v1.json", "hotpotqa_closed_60.json", "hotpotqa_dev_pairs.json"),
)
TWO_WIKI = _Source(
    "2WikiMultihopQA",
    "https://github.com/Alab-NII/2wikimultihop",
    ("2wiki_train.json", "2wikimultihop/train.json"),
    ("2wiki_dev.json", "2wikimultihop/dev.json"),
)
_CORPUS = _Source("the passages of 2WikiMultihopQA", TWO_WIKI.address, (), ("2wiki_passages.json",))


def hotpotqa_tasks(split: str, *, data: str | Path | None = None, file: str | None = None) -> list[dict[str, Any]]:
    """The questions of HotpotQA. `data` is instead of AGENTFLY_DATA; `file` instead of the best one there is."""
    return _tasks(HOTPOTQA, split, data, file)


def two_wiki_tasks(split: str, *, data: str | Path | None = None, file: str | None = None) -> list[dict[str, Any]]:
    """The questions of 2WikiMultihopQA."""
    return _tasks(TWO_WIKI, split, data, file)


def two_wiki_passages(*, data: str | Path | None = None) -> list[Passage]:
    """A corpus of Wikipedia passages, six thousand, for questions of 2WikiMultihopQA: rows with title and text."""
    return list(read_corpus(_found(_CORPUS, _CORPUS.dev, data)))


def _tasks(source: _Source, split: str, data: str | Path | None, file: str | None) -> list[dict[str, Any]]:
    if split not in SPLITS:
        raise ConfigError(f"{source.name} has the splits {', '.join(SPLITS)}, not {split!r}")
    names = (file,) if file is not None else source.dev if split == "test" else source.train
    path = _found(source, names, data)
    rows = [_row(source, row, f"{path}, row {number}") for number, row in enumerate(_rows(path))]
    if split == "test":
        return rows
    return [row for row in rows if (zlib.crc32(row["question"].encode()) % 20 == 0) == (split == "validation")]


def _found(source: _Source, names: Sequence[str], data: str | Path | None) -> Path:
    given = data if data is not None else os.environ.get("AGENTFLY_DATA")
    ask = f"get {names[0]} from {source.address} and put it into the folder retrieval of AGENTFLY_DATA"
    if not given:
        raise ConfigError(f"{source.name} is not shipped, and AGENTFLY_DATA is not set; {ask}")
    folder = Path(given) / "retrieval"
    folder = folder if folder.is_dir() else Path(given)
    for name in names:
        for packed in _PACKED:
            if (path := folder / f"{name}{packed}").is_file():
                return path
    raise ConfigError(f"{folder} has none of {', '.join(names)} ({source.name}); {ask}")


def _rows(path: Path) -> Iterator[Any]:
    try:
        with _OPENERS.get(path.suffix, open)(path, "rt", encoding="utf-8") as file:
            rows = json.load(file)
    except (OSError, EOFError, ValueError, lzma.LZMAError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if not isinstance(rows, list):
        raise DataError(f"{path} must hold a list of questions, not a {type(rows).__name__}")
    yield from rows


def _row(source: _Source, row: Any, place: str) -> dict[str, Any]:
    if not isinstance(row, Mapping) or not all(isinstance(row.get(name), str) for name in ("question", "answer")):
        raise DataError(f"{place}: a question of {source.name} has the texts question and answer, not {row!r:.80}")
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
