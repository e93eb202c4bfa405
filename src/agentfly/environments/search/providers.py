"""Engines on the web and retrieval servers, all asked in one way: keys from the environment, a rate, retries, a cache.

An engine says what a request looks like and how to read the reply; everything else is done once, here. A search that
fails for good raises SearchFailed, which says what to do; a chain sees it as a failed call of its tool.
"""

from __future__ import annotations

import html
import os
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import httpx
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt

from agentfly.environments.search.cache import Cache
from agentfly.environments.search.passages import Hit, Passage
from agentfly.errors import AgentFlyError, ConfigError, DataError, describe
from agentfly.http_body import HEADERS, parse_json, read_body_sync, read_error_text_sync
from agentfly.retrying import RateLimiter, WaitAsAsked, parse_retry_after

RETRIES = 4
TIMEOUT = 20.0
LONGEST_PAUSE = 30.0
MAX_RESPONSE_BYTES = 16 << 20
_AGAIN = {408, 425, 429, 500, 502, 503, 504}
"""Statuses after which asking again may help."""
_TAG = re.compile(r"<[^>]*>")


class SearchFailed(AgentFlyError):
    """An engine gave no results, again and again, or refused."""


class _Retryable(SearchFailed):
    """A response after which asking again may help. `wait`: seconds that the engine asks for, or None."""

    def __init__(self, message: str, wait: float | None) -> None:
        super().__init__(message)
        self.wait = wait


@dataclass(frozen=True, slots=True)
class Engine:
    """How one engine is asked and read."""

    name: str
    address: str
    """Where it is, unless the variable AGENTFLY_<NAME>_URL names another place."""
    ask: Callable[[str, int, str], dict[str, Any]]
    """From query, number and key to what `httpx.Client.request` takes: method, params, json, headers."""
    read: Callable[[Any], list[Passage]]
    """From the JSON of the reply to passages, best first. May raise KeyError and the like for what it cannot read."""
    key: str | None = None
    """The environment variable with the key; None: it needs none."""
    most: int = 10
    """Results that may be asked for at once."""
    per_second: float | None = 5.0
    """Most requests in a second, evenly spaced; None: no limit."""


class Provider:
    """An engine in use: a Retriever. Any number of threads may search at once."""

    def __init__(
        self,
        engine: Engine,
        *,
        per_second: float | None = None,
        cache: Cache | None = None,
        retries: int = RETRIES,
        timeout: float = TIMEOUT,
        max_response_bytes: int = MAX_RESPONSE_BYTES,
    ) -> None:
        self.engine, self._retries, self._max_response_bytes = engine, retries, max_response_bytes
        self._address = os.environ.get(f"AGENTFLY_{engine.name.upper()}_URL") or engine.address
        self._key = _key_of(engine)
        per_second = engine.per_second if per_second is None else per_second
        if per_second is not None and not per_second > 0:
            raise ConfigError(f"a rate must be above 0 searches a second, not {per_second!r}")
        self._rate = None if per_second is None else RateLimiter(1, 1 / per_second)
        self._cache = cache if cache is not None else Cache()
        headers = {**HEADERS, "User-Agent": "agentfly"}
        self._client = httpx.Client(timeout=timeout, headers=headers, follow_redirects=True)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        return [self._one(query, k) for query in queries]

    def _one(self, query: str, k: int) -> list[Hit]:
        return self._cache.get((self.engine.name, self._address, query, k), lambda: self._asked(query, k))

    def _asked(self, query: str, k: int) -> list[Hit]:
        asked = self.engine.ask(query, min(k, self.engine.most), self._key)
        passages = self._replied({"method": "GET", "url": self._address, **asked})[:k]
        return [Hit(each, 1 / rank) for rank, each in enumerate(passages, 1)]

    def _replied(self, request: dict[str, Any]) -> list[Passage]:
        """The passages of the reply. Retries, with a growing pause or the one the engine asks for."""
        attempts = Retrying(
            retry=retry_if_exception_type((_Retryable, httpx.HTTPError, ValueError)),
            wait=WaitAsAsked(0.5, max_backoff=LONGEST_PAUSE, max_asked=LONGEST_PAUSE),
            stop=stop_after_attempt(self._retries + 1),
            reraise=True,
        )
        try:
            return attempts(self._attempt, request)
        except (SearchFailed, httpx.HTTPError, ValueError) as error:
            wrong = str(error) if isinstance(error, SearchFailed) else describe(error)
            raise SearchFailed(f"{self.engine.name} at {self._address} could not be asked: {wrong}") from error

    def _attempt(self, request: dict[str, Any]) -> list[Passage]:
        if self._rate is not None:
            self._rate.acquire_blocking()
        with self._client.stream(**request) as response:
            if response.is_success:
                return self._read(parse_json(read_body_sync(response, self._max_response_bytes)))
            status = response.status_code
            wrong = f"status {status}: {read_error_text_sync(response):.120}"
        if status in _AGAIN:
            raise _Retryable(wrong, parse_retry_after(response.headers.get("retry-after", "")))
        if status in (401, 403):
            key = self.engine.key
            wrong += f"; is {key} right?" if key else "; it refuses access, and is asked without a key"
        raise SearchFailed(wrong)

    def _read(self, reply: Any) -> list[Passage]:
        """The passages of a reply. Raises ValueError for one that the engine's format does not allow."""
        try:
            passages = self.engine.read(reply)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, DataError) as error:
            raise ValueError(f"it replied {reprlib.repr(reply)}, which cannot be read ({error!r:.200})") from error
        if not all(isinstance(text, str) for each in passages for text in (each.title, each.text, each.id)):
            raise ValueError(f"it replied {reprlib.repr(reply)}: title, text and address must be text")
        return passages


def _key_of(engine: Engine) -> str:
    if engine.key is None:
        return ""
    if not (key := os.environ.get(engine.key, "").strip()):
        raise ConfigError(f"{engine.name} needs a key: set the environment variable {engine.key}")
    return key


def plain_text(markup: str) -> str:
    """Text without the marks that engines put around the words that matched."""
    before, closing, after = markup.rpartition(">")  # a scan for the end of a tag never fails before the last ">"
    return html.unescape(_TAG.sub("", before + closing) + after).strip()


# ── retrieval servers ──


def server(address: str) -> Engine:
    """A retrieval server: `agentfly search serve`, one of Search-R1's kind, or, where the address ends in /search, one
    of the original AgentFly's kind."""
    if address.rstrip("/").endswith("/search"):
        return Engine(
            "server",
            address,
            lambda query, k, _: {"method": "POST", "json": {"query": query, "top_k": k}},
            lambda reply: [Passage.of(row, number) for number, row in enumerate(reply["results"])],
            most=100,
            per_second=None,
        )
    address = address.rstrip("/")
    return Engine(
        "server",
        address if address.endswith("/retrieve") else f"{address}/retrieve",
        lambda query, k, _: {"method": "POST", "json": {"queries": [query], "topk": k, "return_scores": True}},
        lambda reply: [Passage.of(_document(row), number) for number, row in enumerate(reply["result"][0])],
        most=100,
        per_second=None,
    )


def _document(row: Mapping[str, Any]) -> Any:
    return row.get("document", row)  # without scores, a row is the document itself


# ── the engines ──


def _passages(rows: Any, title: str, text: str, address: str) -> list[Passage]:
    found = (row for row in rows or () if row.get(text))
    return [Passage(plain_text(row.get(title) or ""), plain_text(row[text]), row.get(address) or "") for row in found]


def _read_wikipedia(reply: Mapping[str, Any]) -> list[Passage]:
    if "error" in reply:
        raise ValueError(reply["error"].get("info"))
    pages = sorted((reply.get("query") or {}).get("pages") or [], key=lambda page: page["index"])
    return [
        Passage(page["title"], page["extract"].strip(), f"https://en.wikipedia.org/wiki/{quote(page['title'])}")
        for page in pages
        if (page.get("extract") or "").strip()
    ]


def _ask_wikipedia(query: str, k: int, _: str) -> dict[str, Any]:
    return {
        "params": {
            "action": "query", "format": "json", "formatversion": 2, "generator": "search", "gsrsearch": query[:300],
            "gsrlimit": k, "prop": "extracts", "exintro": 1, "explaintext": 1, "exlimit": k,
        }
    }  # fmt: skip


def _read_serper(reply: Mapping[str, Any]) -> list[Passage]:
    box = reply.get("answerBox") or {}
    answer = box.get("answer") or box.get("snippet")
    first = [Passage(box.get("title") or "Answer", plain_text(str(answer)), box.get("link") or "")] if answer else []
    return first + _passages(reply.get("organic"), "title", "snippet", "link")


def _ask_tavily(query: str, k: int, key: str) -> dict[str, Any]:
    asked = {"query": query[:400], "max_results": k}
    return {"method": "POST", "json": asked, "headers": {"Authorization": f"Bearer {key}"}}


ENGINES = {
    engine.name: engine
    for engine in (
        Engine("wikipedia", "https://en.wikipedia.org/w/api.php", _ask_wikipedia, _read_wikipedia, most=20),
        Engine(
            "serper",
            "https://google.serper.dev/search",
            lambda query, k, key: {"method": "POST", "json": {"q": query, "num": k}, "headers": {"X-API-KEY": key}},
            _read_serper,
            key="SERPER_API_KEY",
        ),
        Engine(
            "brave",
            "https://api.search.brave.com/res/v1/web/search",
            lambda query, k, key: {"params": {"q": query[:400], "count": k}, "headers": {"X-Subscription-Token": key}},
            lambda reply: _passages((reply.get("web") or {}).get("results"), "title", "description", "url"),
            key="BRAVE_API_KEY",
            most=20,
            per_second=1.0,
        ),
        Engine(
            "tavily",
            "https://api.tavily.com/search",
            _ask_tavily,
            lambda reply: _passages(reply["results"], "title", "content", "url"),
            key="TAVILY_API_KEY",
            most=20,
        ),
    )
}
"""Engines by name."""
