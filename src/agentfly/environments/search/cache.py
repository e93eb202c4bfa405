"""A cache of searches: in memory, the oldest going first; on disk as well where a file is named.

A search that is being made is waited for, not made twice: the chains of a group ask the same things at once.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

from agentfly.environments.search.passages import Hit, Passage


class Cache:
    """What searches gave, by what was asked. Any number of threads may use it; so may processes that share a file."""

    def __init__(self, size: int = 10_000, path: Path | None = None) -> None:
        """Keep so many in memory, 0: none; and all in the file at `path`, if one is named."""
        self.hits = self.misses = 0
        self._size, self._path = size, path
        self._kept: OrderedDict[Hashable, list[Hit]] = OrderedDict()
        self._lock = threading.Lock()
        self._making: dict[Hashable, threading.Lock] = {}
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            with self._disk(path) as disk, disk:
                disk.execute("create table if not exists searches (asked text primary key, found text not null)")

    def get(self, asked: tuple[Hashable, ...], search: Callable[[], list[Hit]]) -> list[Hit]:
        """What was found before, or what `search` finds now. What it raises is not kept."""
        if (found := self.look(asked)) is not None:
            return found
        with self._lock:
            turn = self._making.setdefault(asked, threading.Lock())
        with turn:
            try:
                if (found := self.look(asked)) is None:
                    found = self._on_disk(asked)
                    if found is None:
                        self.misses += 1
                        found = search()
                        self._write(asked, found)
                    self.keep(asked, found)
            finally:
                with self._lock:
                    self._making.pop(asked, None)
        return list(found)

    def look(self, asked: Hashable) -> list[Hit] | None:
        """What memory has; None where it has nothing."""
        with self._lock:
            if asked not in self._kept:
                return None
            self.hits += 1
            self._kept.move_to_end(asked)
            return list(self._kept[asked])

    def keep(self, asked: Hashable, found: list[Hit]) -> None:
        """Keep it in memory."""
        with self._lock:
            self._kept[asked] = list(found)
            while len(self._kept) > self._size:
                self._kept.popitem(last=False)

    def _on_disk(self, asked: tuple[Hashable, ...]) -> list[Hit] | None:
        if self._path is None:
            return None
        with self._disk(self._path) as disk:
            row = disk.execute("select found from searches where asked = ?", (json.dumps(asked),)).fetchone()
        if row is None:
            return None
        self.hits += 1
        return [Hit(Passage(**each["passage"]), each["score"]) for each in json.loads(row[0])]

    def _write(self, asked: tuple[Hashable, ...], found: list[Hit]) -> None:
        if self._path is not None:
            with self._disk(self._path) as disk, disk:
                kept = json.dumps([asdict(hit) for hit in found])
                disk.execute("insert or replace into searches values (?, ?)", (json.dumps(asked), kept))

    @staticmethod
    def _disk(path: Path) -> closing[sqlite3.Connection]:
        return closing(sqlite3.connect(path, timeout=30))
