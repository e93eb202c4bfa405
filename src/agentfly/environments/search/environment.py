"""A library to search in: every chain asks its own questions of passages that all chains share.

What is searched is, in this order: the passages of the task's column `passages`; the generated encyclopaedia that its
column `encyclopaedia` names; the `source` of the class. Indexes are read-only and shared by all instances of a process,
so an instance holds nothing but what its chain has seen.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from agentfly.environment import Environment
from agentfly.environments.search import questions
from agentfly.environments.search.bm25 import BM25Index
from agentfly.environments.search.encyclopaedia import Encyclopaedia
from agentfly.environments.search.opening import open_retriever
from agentfly.environments.search.passages import Passage, Retriever, shown
from agentfly.environments.search.providers import SearchFailed
from agentfly.errors import ConfigError, DataError, EnvironmentFault
from agentfly.threads import call
from agentfly.tooling import tool
from agentfly.types import Task, ToolCall

_SHELF: OrderedDict[tuple[str, int, int], tuple[Encyclopaedia, BM25Index]] = OrderedDict()
_SHELF_LOCK = threading.Lock()
_ROOM = 100_000
"""Articles that are kept indexed, of the encyclopaedias that were used last; the present one in any case."""


class Search(Environment):
    """Passages to be searched: of the task, of a generated encyclopaedia, or of any index, server or engine."""

    scored_by = "qa_em"
    source: ClassVar[Retriever | str | None] = None
    """A retriever; or the folder of an index, the address of a server, the name of an engine. None: see above."""
    top_k: ClassVar[int] = 3
    """Passages that a search shows."""
    longest: ClassVar[int] = 2000
    """Characters of a passage that are shown."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.source is not None and "draw_tasks" not in vars(cls):
            cls.draw_tasks = vars(Environment)["draw_tasks"]  # type: ignore[method-assign]  # ours are not of the source

    @classmethod
    def draw_tasks(
        cls,
        split: str = "train",
        count: int = 100,
        *,
        seed: int = 0,
        hops: Sequence[int] = questions.HOPS,
        articles: int = 200,
    ) -> list[dict[str, Any]]:
        """Questions that take so many `hops`, in turn, about encyclopaedias of so many `articles`."""
        return questions.draw_tasks(split, count, seed, hops, articles)

    async def reset(self, task: Task) -> None:
        columns, self.seen = task.columns, list[str]()
        self._world: Encyclopaedia | None = None
        self._asked: Mapping[str, Any] = columns
        if columns.get("passages") is not None:
            self._retriever = await call(_of_the_task, columns["passages"])
        elif columns.get("encyclopaedia") is not None:
            self._world, self._retriever = await call(_drawn, *_named(columns["encyclopaedia"]))
        elif (source := self.source) is None:
            raise DataError(
                f"nothing to search in: task {task.id!r} has neither passages nor an encyclopaedia, and "
                f"{type(self).__name__}.source is not set; Search.draw_tasks makes tasks that have one"
            )
        else:
            self._retriever = await call(open_retriever, source) if isinstance(source, str) else source

    @tool
    async def search(self, query: str) -> dict[str, Any]:
        """Search for passages. Shows the few that fit best, each with its title.

        Args:
            query: What to look for: a name, or a few words that the passage should have.
        """
        if not query.strip():
            return {"observation": "Error: the query is empty. Say what to look for.", "titles": []}
        try:
            (hits,) = await call(self._retriever.search, [query], self.top_k)
        except SearchFailed as error:  # no query could have done better
            raise EnvironmentFault(str(error)) from error
        titles = [hit.passage.title for hit in hits]
        self.seen += titles
        return {"observation": shown(hits, self.longest), "titles": titles}

    def expert(self) -> ToolCall | str:
        """Search for the first article, then for whatever it points to, and say what the last one tells.

        It knows which relations the question means, but of the facts only those of articles that it has been shown.
        """
        if self._world is None or "path" not in self._asked:
            raise ConfigError("only the questions of Search.draw_tasks have an expert; these have no column `path`")
        what = self._asked["start"]
        for relation in self._asked["path"]:
            if what not in self.seen:
                return ToolCall("search", {"query": what})
            what = self._world.facts[what][relation]
        return str(what)


def _named(column: Any) -> tuple[str, int, int]:
    try:
        split, seed, articles = column["split"], column["seed"], column["articles"]
    except (TypeError, KeyError):
        raise DataError(f"the column 'encyclopaedia' must have split, seed and articles, not {column!r:.80}") from None
    if not isinstance(seed, int) or not isinstance(articles, int) or not isinstance(split, str):
        raise DataError(f"the column 'encyclopaedia' has a split, a whole seed and size, not {column!r:.80}")
    return split, seed, articles


def _drawn(split: str, seed: int, articles: int) -> tuple[Encyclopaedia, BM25Index]:
    key = (split, seed, articles)
    with _SHELF_LOCK:  # the chains of a group ask for the same one at once
        if key not in _SHELF:
            world = Encyclopaedia.draw(*key)
            _SHELF[key] = world, BM25Index(world.passages)
        _SHELF.move_to_end(key)
        while len(_SHELF) > 1 and sum(size for _, _, size in _SHELF) > _ROOM:
            _SHELF.popitem(last=False)
        return _SHELF[key]


def _of_the_task(rows: Any) -> BM25Index:
    if not isinstance(rows, list | tuple) or not rows:
        raise DataError(f"the column 'passages' must be a list of at least one passage, not {rows!r:.80}")
    return BM25Index([Passage.of(row, number) for number, row in enumerate(rows)])
