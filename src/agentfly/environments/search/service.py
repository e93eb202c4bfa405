"""A retriever served over HTTP, as Search-R1 and the original AgentFly ask for it.

    POST /retrieve  {"queries": [text, …], "topk": 3, "return_scores": true}
                    {"result": [[{"document": {"id", "contents", "title", "text"}, "score"}, …], …]}
    POST /search    {"query": text, "top_k": 3}     {"results": [{"contents", …}, …]}
    GET  /health    {"status": "ok", …}

Searches that wait while another is made are made together, and one that is being made is not made twice: it is one
miss of the cache, however many wait for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from agentfly.environments.search.cache import Cache
from agentfly.environments.search.guard import BrowserGuard
from agentfly.environments.search.passages import Hit, Retriever
from agentfly.environments.search.providers import SearchFailed
from agentfly.errors import describe
from agentfly.extras import require_extra
from agentfly.http_body import parse_json
from agentfly.threads import call

MOST_PASSAGES, MOST_QUERIES, MOST_BYTES = 100, 1000, 8 << 20
Asked = tuple[str, int]


class Desk:
    """Takes searches, makes them in batches, and remembers them. Belongs to one event loop."""

    def __init__(self, retriever: Retriever, cache: Cache, *, batch: int = 64, workers: int = 1) -> None:
        """`workers` batches of at most `batch` queries are made at once."""
        self.cache, self.batches = cache, 0
        self._retriever, self._batch, self._workers = retriever, batch, workers
        self._waiting: dict[Asked, asyncio.Future[list[Hit]]] = {}
        self._made: dict[Asked, asyncio.Future[list[Hit]]] = {}
        self._working = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def search(self, query: str, k: int) -> list[Hit]:
        """The best `k` passages for a query."""
        asked = (query, k)
        if (found := self.cache.look(asked)) is not None:
            return found
        future = self._waiting.get(asked) or self._made.get(asked)
        if future is None:
            self.cache.misses += 1
            future = self._waiting[asked] = asyncio.get_running_loop().create_future()
            if self._working < self._workers:
                self._working += 1
                task = asyncio.create_task(self._work())
                self._tasks.add(task)  # the loop itself would let it be collected
                task.add_done_callback(self._tasks.discard)
        return list(await asyncio.shield(future))  # others may wait for it too

    async def _work(self) -> None:
        """Make whatever waits, batch by batch, until nothing does."""
        try:
            while self._waiting:
                batch = dict(list(self._waiting.items())[: self._batch])
                for asked in batch:
                    self._made[asked] = self._waiting.pop(asked)
                await self._make(batch)
        finally:  # at once: who comes between the last look and this would wait for ever
            self._working -= 1

    async def _make(self, batch: Mapping[Asked, asyncio.Future[list[Hit]]]) -> None:
        self.batches += 1
        try:
            most = max(k for _, k in batch)
            found = await call(self._retriever.search, [query for query, _ in batch], most)
            for (asked, future), hits in zip(batch.items(), found, strict=True):
                self.cache.keep(asked, hits[: asked[1]])
                future.set_result(hits[: asked[1]])
        except Exception as error:
            for future in (each for each in batch.values() if not each.done()):
                future.set_exception(error)
                future.exception()  # whoever asked may have gone
        finally:
            for asked in batch:
                self._made.pop(asked, None)


def application(desk: Desk, about: Mapping[str, Any], top_k: int = 3, allowed_hosts: Sequence[str] = ()) -> Any:
    """The server, as an ASGI application. `top_k` is for those who do not say how many they want.

    `allowed_hosts`: names that requests may have as Host or Origin, besides those that BrowserGuard always allows.
    """
    with require_extra("serving", "search"):
        import uvicorn  # noqa: F401  (who serves needs it next; better to hear so now)
        from starlette.applications import Starlette
        from starlette.requests import Request
        from starlette.responses import JSONResponse, Response
        from starlette.routing import Route

    async def replied(request: Request, path: str) -> Response:
        try:
            body = bytearray()
            async for part in request.stream():
                body += part
                if len(body) > MOST_BYTES:
                    return JSONResponse({"error": f"a request has at most {MOST_BYTES} bytes"}, 413)
            asked = parse_json(body)
            reply = await (_retrieve if path == "/retrieve" else _search)(desk, asked, top_k)
            return JSONResponse(reply)
        except SearchFailed as error:
            return JSONResponse({"error": str(error)}, 502)
        except ValueError as error:
            return JSONResponse({"error": str(error)}, 400)
        except Exception as error:
            return JSONResponse({"error": describe(error)}, 500)

    async def retrieve(request: Request) -> Response:
        return await replied(request, "/retrieve")

    async def search(request: Request) -> Response:
        return await replied(request, "/search")

    async def health(_: Request) -> Response:
        cache = {"hits": desk.cache.hits, "misses": desk.cache.misses}
        return JSONResponse({"status": "ok", **about, "batches": desk.batches, "cache": cache})

    served = Starlette(
        routes=[
            Route("/retrieve", retrieve, methods=["POST"]),
            Route("/search", search, methods=["POST"]),
            Route("/health", health),
        ]
    )
    return BrowserGuard(served, allowed_hosts)


async def _retrieve(desk: Desk, asked: Any, top_k: int) -> dict[str, Any]:
    queries, k = _field(asked, "queries"), _number(asked, "topk", top_k)
    if not isinstance(queries, list) or not all(isinstance(each, str) for each in queries):
        raise ValueError(f"queries must be a list of texts, not {queries!r:.80}")
    if len(queries) > MOST_QUERIES:
        raise ValueError(f"a request has at most {MOST_QUERIES} queries, not {len(queries)}")
    found = await asyncio.gather(*(desk.search(query, k) for query in queries))
    scored = bool(asked.get("return_scores"))
    return {"result": [[_row(hit, scored) for hit in hits] for hits in found]}


async def _search(desk: Desk, asked: Any, top_k: int) -> dict[str, Any]:
    query, k = _field(asked, "query"), _number(asked, "top_k", top_k)
    if not isinstance(query, str):
        raise ValueError(f"query must be a text, not {query!r:.80}")
    return {"results": [_document(hit) for hit in await desk.search(query, k)]}


def _row(hit: Hit, scored: bool) -> dict[str, Any]:
    return {"document": _document(hit), "score": hit.score} if scored else _document(hit)


def _document(hit: Hit) -> dict[str, Any]:
    passage = hit.passage
    return {"id": passage.id, "contents": passage.contents, "title": passage.title, "text": passage.text}


def _field(asked: Any, name: str) -> Any:
    if not isinstance(asked, Mapping) or name not in asked:
        raise ValueError(f"a request is an object with {name}, not {asked!r:.80}")
    return asked[name]


def _number(asked: Mapping[str, Any], name: str, otherwise: int) -> int:
    number = asked.get(name)
    if number is None:
        return otherwise
    if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number <= MOST_PASSAGES:
        raise ValueError(f"{name} must be a whole number from 1 to {MOST_PASSAGES}, not {number!r:.80}")
    return number
