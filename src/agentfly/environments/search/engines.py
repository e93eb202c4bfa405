"""Web search engines and retrieval servers as retrievers: API keys from the environment, rate limit, retries, cache.

A SearchEngine describes the requests and responses of one API. Provider does the rest. A search that fails for good
raises SearchFailed. `open_retriever` also opens index folders.
"""

from __future__ import annotations

import html
import json
import os
import re
import reprlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt

from agentfly.backends.http_body import HEADERS, parse_json, read_body_sync, read_error_text_sync
from agentfly.backends.retrying import RateLimiter, WaitAsAsked, parse_retry_after
from agentfly.environments.data import query_sqlite
from agentfly.environments.search.index import Hit, Passage, Retriever, load_index
from agentfly.errors import AgentFlyError, ConfigError, DataError, describe

RETRIES = 4
TIMEOUT = 20.0
"""Seconds per request."""
MAX_RETRY_DELAY = 30.0
"""Seconds."""
MAX_RESPONSE_BYTES = 16 << 20
_RETRYABLE_STATUSES = {408, 425, 429, 500, 502, 503, 504}
_TAG = re.compile(r"<[^>]*>")


class SearchFailed(AgentFlyError):
    """A search engine rejected the request, or still failed after the retries."""


class _RetryableSearch(SearchFailed):
    """A transient failure. `wait`: seconds that the engine asks for, or None."""

    def __init__(self, message: str, wait: float | None) -> None:
        super().__init__(message)
        self.wait = wait


class Cache:
    """LRU cache of search results in memory, optionally also in an SQLite file.

    Thread-safe. Several processes may share the file. A search in progress is awaited, not repeated, because the chains
    of a group often send the same query at once. Errors are not cached.
    """

    def __init__(self, size: int = 10_000, path: Path | None = None) -> None:
        """`size`: entries in memory. 0 disables it. `path`: file that stores all entries."""
        self.hits = self.misses = 0
        self._size, self._path = size, path
        self._entries: OrderedDict[Hashable, list[Hit]] = OrderedDict()
        self._lock = threading.Lock()
        self._in_progress: dict[Hashable, threading.Lock] = {}
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._query_file("create table if not exists searches (asked text primary key, found text not null)")

    def get(self, key: tuple[Hashable, ...], search: Callable[[], list[Hit]]) -> list[Hit]:
        """Return the cached hits of a key, or call `search` and cache its result."""
        if (hits := self.lookup(key)) is not None:
            return hits
        with self._lock:
            turn = self._in_progress.setdefault(key, threading.Lock())
        with turn:
            try:
                if (hits := self.lookup(key)) is None:
                    file_key = json.dumps(key) if self._path is not None else ""
                    if stored := self._query_file("select found from searches where asked = ?", file_key):
                        self.hits += 1
                        hits = [Hit(Passage(**hit["passage"]), hit["score"]) for hit in json.loads(stored[0][0])]
                    else:
                        self.misses += 1
                        hits = search()
                        value = json.dumps([asdict(hit) for hit in hits]) if self._path is not None else ""
                        self._query_file("insert or replace into searches values (?, ?)", file_key, value)
                    self.insert(key, hits)
            finally:
                with self._lock:
                    self._in_progress.pop(key, None)
        return list(hits)

    def lookup(self, key: Hashable) -> list[Hit] | None:
        """Return the entry in memory, or None."""
        with self._lock:
            if key not in self._entries:
                return None
            self.hits += 1
            self._entries.move_to_end(key)
            return list(self._entries[key])

    def insert(self, key: Hashable, hits: list[Hit]) -> None:
        """Store an entry in memory and evict the least recently used ones."""
        with self._lock:
            self._entries[key] = list(hits)
            while len(self._entries) > self._size:
                self._entries.popitem(last=False)

    def _query_file(self, statement: str, *values: str) -> list[tuple[str, ...]]:
        return [] if self._path is None else query_sqlite(self._path, statement, *values)


@dataclass(frozen=True, slots=True)
class SearchEngine:
    """Request and response format of a search API."""

    name: str
    address: str
    """URL, unless the environment variable AGENTFLY_<NAME>_URL overrides it."""
    build_request: Callable[[str, int, str], dict[str, Any]]
    """From query, number of results and API key to arguments of `httpx.Client.request`."""
    parse_response: Callable[[Any], list[Passage]]
    """From the JSON response to passages, best first. May raise KeyError and the like for a malformed response."""
    key: str | None = None
    """Environment variable of the API key. None: no key needed."""
    max_results: int = 10
    """Largest number of results per request."""
    per_second: float | None = 5.0
    """Default rate limit: requests per second. None: no limit."""


class Provider:
    """A Retriever that queries a search engine over HTTP. Thread-safe."""

    def __init__(
        self,
        engine: SearchEngine,
        *,
        per_second: float | None = None,
        cache: Cache | None = None,
        retries: int = RETRIES,
        timeout: float = TIMEOUT,
        max_response_bytes: int = MAX_RESPONSE_BYTES,
    ) -> None:
        self.engine, self._retries, self._max_response_bytes = engine, retries, max_response_bytes
        self._address = os.environ.get(f"AGENTFLY_{engine.name.upper()}_URL") or engine.address
        self._key = os.environ.get(engine.key, "").strip() if engine.key is not None else ""
        if engine.key is not None and not self._key:
            raise ConfigError(f"{engine.name} needs a key: set the environment variable {engine.key}")
        per_second = per_second if per_second is not None else engine.per_second
        if per_second is not None and not per_second > 0:
            raise ConfigError(f"a rate must be above 0 searches a second, not {per_second!r}")
        self._rate_limiter = None if per_second is None else RateLimiter(1, 1 / per_second)
        self._cache = cache if cache is not None else Cache()
        headers = {**HEADERS, "User-Agent": "agentfly"}
        self._client = httpx.Client(timeout=timeout, headers=headers, follow_redirects=True)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        return [
            self._cache.get((self.engine.name, self._address, query, k), partial(self._fetch, query, k))
            for query in queries
        ]

    def _fetch(self, query: str, k: int) -> list[Hit]:
        """Send a query. Transient failures are retried with exponential backoff, or after `Retry-After`."""
        arguments = self.engine.build_request(query, min(k, self.engine.max_results), self._key)
        request = {"method": "GET", "url": self._address, **arguments}
        attempts = Retrying(
            retry=retry_if_exception_type((_RetryableSearch, httpx.HTTPError, ValueError)),
            wait=WaitAsAsked(0.5, max_backoff=MAX_RETRY_DELAY, max_asked=MAX_RETRY_DELAY),
            stop=stop_after_attempt(self._retries + 1),
            reraise=True,
        )
        try:
            passages = attempts(self._send, request)
        except (SearchFailed, httpx.HTTPError, ValueError) as error:
            problem = str(error) if isinstance(error, SearchFailed) else describe(error)
            raise SearchFailed(f"{self.engine.name} at {self._address} could not be asked: {problem}") from error
        return [Hit(passage, 1 / rank) for rank, passage in enumerate(passages[:k], 1)]

    def _send(self, request: dict[str, Any]) -> list[Passage]:
        """Send one request and parse the response. Raises ValueError if the response is malformed."""
        if self._rate_limiter is not None:
            self._rate_limiter.acquire_blocking()
        with self._client.stream(**request) as response:
            status = response.status_code
            if response.is_success:
                reply = parse_json(read_body_sync(response, self._max_response_bytes))
            else:
                problem = f"status {status}: {read_error_text_sync(response):.120}"
        if response.is_success:
            try:
                passages = self.engine.parse_response(reply)
            except (KeyError, TypeError, ValueError, AttributeError, IndexError, DataError) as error:
                raise ValueError(f"it replied {reprlib.repr(reply)}, which cannot be read ({error!r:.200})") from error
            if not all(
                isinstance(text, str) for passage in passages for text in (passage.title, passage.text, passage.id)
            ):
                raise ValueError(f"it replied {reprlib.repr(reply)}: title, text and address must be text")
            return passages
        if status in _RETRYABLE_STATUSES:
            raise _RetryableSearch(problem, parse_retry_after(response.headers.get("retry-after", "")))
        if status in (401, 403):
            key = self.engine.key
            problem += f"; is {key} right?" if key else "; it refuses access, and is asked without a key"
        raise SearchFailed(problem)


def strip_markup(markup: str) -> str:
    """Remove the tags that engines put around matching words, and unescape HTML entities."""
    # Only the part up to the last ">" is searched for tags: the regex then takes linear time.
    tagged, closing_bracket, plain = markup.rpartition(">")
    return html.unescape(_TAG.sub("", tagged + closing_bracket) + plain).strip()


def server(address: str) -> SearchEngine:
    """A retrieval server: `agentfly search serve`, the API of Search-R1, or, if the address ends in /search, the API of
    the original AgentFly."""
    bare = address.rstrip("/")
    is_single = bare.endswith("/search")

    def build_request(query: str, k: int, _: str) -> dict[str, Any]:
        batch = {"queries": [query], "topk": k, "return_scores": True}
        return {"method": "POST", "json": {"query": query, "top_k": k} if is_single else batch}

    def parse_response(reply: Any) -> list[Passage]:
        rows = reply["results"] if is_single else reply["result"][0]
        # Without scores, a row of a batch is the document itself.
        documents = rows if is_single else [row.get("document", row) for row in rows]
        return [Passage.of(document, number) for number, document in enumerate(documents)]

    batch_url = bare if bare.endswith("/retrieve") else f"{bare}/retrieve"
    url = address if is_single else batch_url
    return SearchEngine("server", url, build_request, parse_response, max_results=100, per_second=None)


def _parse_rows(rows: Any, title: str, text: str, address: str) -> list[Passage]:
    """Read passages from rows with these keys; rows without text are skipped."""
    return [
        Passage(strip_markup(row.get(title) or ""), strip_markup(row[text]), row.get(address) or "")
        for row in rows or ()
        if row.get(text)
    ]


def _build_wikipedia_request(query: str, k: int, _: str) -> dict[str, Any]:
    return {
        "params": {
            "action": "query", "format": "json", "formatversion": 2, "generator": "search", "gsrsearch": query[:300],
            "gsrlimit": k, "prop": "extracts", "exintro": 1, "explaintext": 1, "exlimit": k,
        }
    }  # fmt: skip


def _parse_wikipedia(reply: Mapping[str, Any]) -> list[Passage]:
    if "error" in reply:
        raise ValueError(reply["error"].get("info"))
    pages = sorted((reply.get("query") or {}).get("pages") or [], key=lambda page: page["index"])
    return [
        Passage(page["title"], page["extract"].strip(), f"https://en.wikipedia.org/wiki/{quote(page['title'])}")
        for page in pages
        if (page.get("extract") or "").strip()
    ]


def _parse_serper(reply: Mapping[str, Any]) -> list[Passage]:
    box = reply.get("answerBox") or {}
    passages = _parse_rows(reply.get("organic"), "title", "snippet", "link")
    if answer := box.get("answer") or box.get("snippet"):
        passages.insert(0, Passage(box.get("title") or "Answer", strip_markup(str(answer)), box.get("link") or ""))
    return passages


ENGINES = {
    engine.name: engine
    for engine in (
        SearchEngine(
            "wikipedia",
            "https://en.wikipedia.org/w/api.php",
            _build_wikipedia_request,
            _parse_wikipedia,
            max_results=20,
        ),
        SearchEngine(
            "serper",
            "https://google.serper.dev/search",
            lambda query, k, key: {"method": "POST", "json": {"q": query, "num": k}, "headers": {"X-API-KEY": key}},
            _parse_serper,
            key="SERPER_API_KEY",
        ),
        SearchEngine(
            "brave",
            "https://api.search.brave.com/res/v1/web/search",
            lambda query, k, key: {"params": {"q": query[:400], "count": k}, "headers": {"X-Subscription-Token": key}},
            lambda reply: _parse_rows((reply.get("web") or {}).get("results"), "title", "description", "url"),
            key="BRAVE_API_KEY",
            max_results=20,
            per_second=1.0,
        ),
        SearchEngine(
            "tavily",
            "https://api.tavily.com/search",
            lambda query, k, key: {
                "method": "POST",
                "json": {"query": query[:400], "max_results": k},
                "headers": {"Authorization": f"Bearer {key}"},
            },
            lambda reply: _parse_rows(reply["results"], "title", "content", "url"),
            key="TAVILY_API_KEY",
            max_results=20,
        ),
    )
}
"""Search engines by name."""

_RETRIEVERS: dict[str, Retriever] = {}
_RETRIEVERS_LOCK = threading.Lock()


def open_retriever(source: str) -> Retriever:
    """Open an index folder, the URL of a retrieval server or a search engine by name; once per process."""
    with _RETRIEVERS_LOCK:
        if source not in _RETRIEVERS:
            if source.startswith(("http://", "https://")):
                _RETRIEVERS[source] = Provider(server(source))
            elif source in ENGINES:
                _RETRIEVERS[source] = Provider(ENGINES[source])
            elif Path(source).is_dir():
                _RETRIEVERS[source] = load_index(Path(source))
            else:
                raise ConfigError(
                    f"{source!r} is not an index folder, a URL or a search engine; engines are {', '.join(ENGINES)}"
                )
        return _RETRIEVERS[source]
