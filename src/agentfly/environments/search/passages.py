"""Passages: what is searched, and what a search gives back.

A corpus is a file of rows, JSON or JSON lines, also packed as .gz or .xz. A row has `title` and `text`, or `contents`
whose first line is the title, as the corpora of Search-R1 have it.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, overload

import numpy as np

from agentfly.environments.data import read_rows
from agentfly.errors import DataError


@dataclass(frozen=True, slots=True)
class Passage:
    """A piece of text that can be found."""

    title: str
    text: str
    id: str = ""
    """What the corpus calls it, or its address on the web; empty where it has no name."""

    @property
    def contents(self) -> str:
        """Title and text in one, as retrievers of Search-R1 send them."""
        return f'"{self.title}"\n{self.text}'

    @classmethod
    def of(cls, row: Any, number: int) -> Passage:
        """Read a row of a corpus."""
        if isinstance(row, Passage):
            return row
        if not isinstance(row, Mapping):
            raise DataError(f"passage {number} must be an object with title and text, or contents, not {row!r:.80}")
        title, text = row.get("title"), row.get("text")
        if isinstance(row.get("contents"), str) and text is None:
            first, _, text = row["contents"].partition("\n")
            title = first.strip().strip('"') if title is None else title
        if not isinstance(text, str) or not isinstance(title, str | None):
            has = ", ".join(map(repr, row)) or "nothing"
            raise DataError(f"passage {number} must have the texts title and text, or contents; it has {has}")
        return cls(title or "", text, str(row.get("id", number)))


@dataclass(frozen=True, slots=True)
class Hit:
    """A passage that was found."""

    passage: Passage
    score: float
    """Higher is better; only comparable within one search."""


class Retriever(Protocol):
    """Something that finds passages: an index here, a server elsewhere, an engine on the web."""

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """The best `k` passages for each query, best first; fewer where fewer fit. May be called from many threads."""
        ...


def shown(hits: Sequence[Hit], longest: int = 2000) -> str:
    """What a model is shown of a search: numbered passages, each cut to so many characters."""
    if not hits:
        return "Nothing was found. Try other words."
    return "\n\n".join(f"[{n}] {hit.passage.title}\n{_cut(hit.passage.text, longest)}" for n, hit in enumerate(hits, 1))


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[:longest].rstrip()} …"


def read_corpus(path: str | Path, limit: int | None = None) -> Iterator[Passage]:
    """The passages of a file, one after another; the first `limit` of them."""
    for number, (_, row) in enumerate(islice(read_rows(Path(path)), limit)):
        yield Passage.of(row, number)


class PassageFile(Sequence[Passage]):
    """Passages on disk, read one by one as they are asked for: a corpus need not fit into memory."""

    def __init__(self, folder: Path) -> None:
        self._ends = np.load(folder / "passages.npy", mmap_mode="r")
        with (folder / "passages.jsonl").open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    @staticmethod
    def write(folder: Path, passages: Iterable[Passage]) -> int:
        """Write passages to a folder, and say how many there were."""
        ends, end = [0], 0
        with (folder / "passages.jsonl").open("wb") as file:
            for each in passages:
                row = {"id": each.id, "title": each.title, "text": each.text}
                end += file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
                ends.append(end)
        np.save(folder / "passages.npy", np.array(ends, dtype=np.int64))
        return len(ends) - 1

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, at: int) -> Passage: ...
    @overload
    def __getitem__(self, at: slice) -> list[Passage]: ...
    def __getitem__(self, at: int | slice) -> Passage | list[Passage]:
        if isinstance(at, slice):
            return [self[each] for each in range(*at.indices(len(self)))]
        if not 0 <= at < len(self):
            raise IndexError(at)
        row = json.loads(self._bytes[self._ends[at] : self._ends[at + 1]])
        return Passage(row["title"], row["text"], row["id"])
