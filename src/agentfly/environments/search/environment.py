"""Search environment: each chain searches passages that all chains share. And search tools without an environment.

The source of passages is, in this order: the task's column `passages`, the generated encyclopedia that its column
`encyclopedia` names, or the attribute `source` of the class. Indexes are read-only and shared by all instances of a
process, so an instance stores only which titles its chain has seen.

The tools search the web, Wikipedia, a retrieval server, or any other retriever under a name of your choice. A retriever
is opened on the first search, so a missing API key is reported only when the tool is used. All chains share the
connections, the rate limit and the cache of a retriever.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, ClassVar

from agentfly.environment import Environment
from agentfly.environments.search import tasks
from agentfly.environments.search.engines import SearchFailed, open_retriever
from agentfly.environments.search.index import BM25Index, Passage, Retriever, format_hits
from agentfly.environments.search.tasks import Encyclopedia
from agentfly.errors import ConfigError, DataError, EnvironmentFault
from agentfly.threads import call
from agentfly.tooling import Tool, tool
from agentfly.types import Task, ToolCall

TOP_K = 3
"""Number of passages per search."""
SERVER = "RETRIEVER_API_URL"
"""Environment variable with the URL of the retrieval server."""
_EMPTY_QUERY = "Error: the query is empty. Say what to look for."
_ENCYCLOPEDIAS: OrderedDict[tuple[str, int, int], tuple[Encyclopedia, BM25Index]] = OrderedDict()
"""LRU cache by split, seed and number of articles."""
_ENCYCLOPEDIAS_LOCK = threading.Lock()
_MAX_CACHED_ARTICLES = 100_000
"""Total number of articles in the cache. The current encyclopedia is never evicted."""


class Search(Environment):
    """Passage search: over the task's passages, a generated encyclopedia, an index, a server or a search engine."""

    scored_by = "qa_em"
    source: ClassVar[Retriever | str | None] = None
    """A retriever, an index folder, the URL of a server or the name of a search engine. None: the task's own."""
    top_k: ClassVar[int] = TOP_K
    """Number of passages per search."""
    longest: ClassVar[int] = 2000
    """Number of characters of a passage that are shown."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.source is not None and "draw_tasks" not in vars(cls):
            # Generated questions are not about the passages of `source`.
            cls.draw_tasks = vars(Environment)["draw_tasks"]

    draw_tasks = staticmethod(tasks.draw_tasks)

    async def reset(self, task: Task) -> None:
        columns, self.seen = task.columns, list[str]()
        self._encyclopedia: Encyclopedia | None = None
        self._columns: Mapping[str, Any] = columns
        if (rows := columns.get("passages")) is not None:
            if not isinstance(rows, list | tuple) or not rows:
                raise DataError(f"the column 'passages' must be a list of at least one passage, not {rows!r:.80}")
            self._retriever: Retriever = await call(
                lambda: BM25Index([Passage.of(row, number) for number, row in enumerate(rows)])
            )
        elif columns.get("encyclopedia") is not None:
            self._encyclopedia, self._retriever = await call(_load_encyclopedia, columns["encyclopedia"])
        elif (source := self.source) is None:
            raise DataError(
                f"nothing to search in: task {task.id!r} has neither passages nor an encyclopedia, and "
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
            return {"observation": _EMPTY_QUERY, "titles": []}
        try:
            (hits,) = await call(self._retriever.search, [query], self.top_k)
        except SearchFailed as error:  # not the model's fault: any query would have failed
            raise EnvironmentFault(str(error)) from error
        titles = [hit.passage.title for hit in hits]
        self.seen += titles
        return {"observation": format_hits(hits, self.longest), "titles": titles}

    async def snapshot(self) -> list[str]:
        """The titles that the chain has seen."""
        return list(self.seen)

    async def restore(self, state: list[str]) -> None:
        """Continue after these titles."""
        self.seen = list(state)

    def expert(self) -> ToolCall | str:
        """Search for the articles on the path one after another, then give the answer.

        The expert knows the relations of the question, but reads facts only from articles that the chain has seen.
        """
        if self._encyclopedia is None or "path" not in self._columns:
            raise ConfigError("only the questions of Search.draw_tasks have an expert; these have no column `path`")
        subject = self._columns["start"]
        for relation in self._columns["path"]:
            if subject not in self.seen:
                return ToolCall("search", {"query": subject})
            subject = self._encyclopedia.facts[subject][relation]
        return str(subject)


def _load_encyclopedia(column: Any) -> tuple[Encyclopedia, BM25Index]:
    """Draw and index the encyclopedia that a column names, or take it from the cache."""
    try:
        key = split, seed, articles = column["split"], column["seed"], column["articles"]
    except (TypeError, KeyError):
        raise DataError(f"the column 'encyclopedia' must have split, seed and articles, not {column!r:.80}") from None
    if not isinstance(seed, int) or not isinstance(articles, int) or not isinstance(split, str):
        raise DataError(f"the column 'encyclopedia' has a split, a whole seed and size, not {column!r:.80}")
    with _ENCYCLOPEDIAS_LOCK:  # the chains of a group request the same one at once
        if key not in _ENCYCLOPEDIAS:
            encyclopedia = Encyclopedia.draw(*key)
            _ENCYCLOPEDIAS[key] = encyclopedia, BM25Index(encyclopedia.passages)
        _ENCYCLOPEDIAS.move_to_end(key)
        while len(_ENCYCLOPEDIAS) > 1 and sum(size for _, _, size in _ENCYCLOPEDIAS) > _MAX_CACHED_ARTICLES:
            _ENCYCLOPEDIAS.popitem(last=False)
        return _ENCYCLOPEDIAS[key]


async def _search(source: Retriever | str, query: str, top_k: int) -> str:
    if not query.strip():
        return _EMPTY_QUERY
    retriever = await call(open_retriever, source) if isinstance(source, str) else source
    (hits,) = await call(retriever.search, [query], top_k)
    return format_hits(hits)


def search_tool(source: Retriever | str, name: str = "search", *, top_k: int = TOP_K) -> Tool:
    """Create a search tool for a retriever, an index folder, the URL of a server, or a search engine by name."""

    @tool(name=name)
    async def search(query: str) -> str:
        """Search for passages. Shows the few that fit best, each with its title.

        Args:
            query: What to look for: a name, or a few words that the passage should have.
        """
        return await _search(source, query, top_k)

    return search


@tool
async def google_search(query: str) -> str:
    """Search the web. Shows the titles and excerpts of the best pages.

    Args:
        query: What to look for, in the words that a page about it would have.
    """
    return await _search("serper", query, TOP_K)


@tool
async def wikipedia_search(query: str) -> str:
    """Search Wikipedia. Shows the titles and introductions of the best articles.

    Args:
        query: What to look for: the name of an article, or a few words.
    """
    return await _search("wikipedia", query, TOP_K)


@tool
async def retrieve(query: str) -> str:
    """Search a collection of passages. Shows the few that fit best, each with its title.

    Args:
        query: What to look for: a name, or a few words that the passage should have.
    """
    if not (address := os.environ.get(SERVER)):
        raise ConfigError(f"set {SERVER} to the address of a retrieval server; `agentfly search serve` starts one")
    return await _search(address, query, TOP_K)
