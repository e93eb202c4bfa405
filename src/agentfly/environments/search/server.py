"""HTTP server of a retriever, with the APIs of Search-R1 and of the original AgentFly.

    POST /retrieve  {"queries": [text, …], "topk": 3, "return_scores": true}
                    {"result": [[{"document": {"id", "contents", "title", "text"}, "score"}, …], …]}
    POST /search    {"query": text, "top_k": 3}     {"results": [{"contents", …}, …]}
    GET  /health    {"status": "ok", …}

Queries that arrive during a search are batched, and a query in progress is not repeated: it is one cache miss, however
many requests wait for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from agentfly.backends.http_body import parse_json
from agentfly.environments.search.engines import Cache, SearchFailed
from agentfly.environments.search.index import Hit, Retriever
from agentfly.errors import describe, require_extra
from agentfly.gateway.http_server import BrowserGuard
from agentfly.threads import call

MAX_PASSAGES, MAX_QUERIES, MAX_BYTES = 100, 1000, 8 << 20
"""Limits of a request: passages per query, queries, and bytes of the body."""
Query = tuple[str, int]
"""Text and number of passages."""


class QueryBatcher:
    """Runs queries in batches and caches their results. Belongs to one event loop."""

    def __init__(self, retriever: Retriever, cache: Cache, *, batch: int = 64, workers: int = 1) -> None:
        """At most `workers` batches of at most `batch` queries run concurrently."""
        self.cache, self.batches = cache, 0
        self._retriever, self._batch, self._workers = retriever, batch, workers
        self._queued: dict[Query, asyncio.Future[list[Hit]]] = {}
        self._running: dict[Query, asyncio.Future[list[Hit]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # the event loop itself keeps only weak references
        self._active = 0

    async def search(self, query: str, k: int) -> list[Hit]:
        """Return the best `k` passages."""
        key = (query, k)
        if (hits := self.cache.lookup(key)) is not None:
            return hits
        future = self._queued.get(key) or self._running.get(key)
        if future is None:
            self.cache.misses += 1
            future = self._queued[key] = asyncio.get_running_loop().create_future()
            if self._active < self._workers:
                self._active += 1
                task = asyncio.create_task(self._work())
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        return list(await asyncio.shield(future))  # cancelling one request must not cancel the others

    async def _work(self) -> None:
        """Run batches until the queue is empty."""
        try:
            while self._queued:
                batch = dict(list(self._queued.items())[: self._batch])
                for key in batch:
                    self._running[key] = self._queued.pop(key)
                self.batches += 1
                try:
                    largest = max(k for _, k in batch)
                    results = await call(self._retriever.search, [query for query, _ in batch], largest)
                    for (key, future), hits in zip(batch.items(), results, strict=True):
                        self.cache.insert(key, hits[: key[1]])
                        future.set_result(hits[: key[1]])
                except Exception as error:
                    for future in (future for future in batch.values() if not future.done()):
                        future.set_exception(error)
                        future.exception()  # marks it as retrieved: all its requests may have been cancelled
                finally:
                    for key in batch:
                        self._running.pop(key, None)
        finally:  # without an await since the last look at the queue, so that no query is left behind
            self._active -= 1


def create_app(
    batcher: QueryBatcher, metadata: Mapping[str, Any], top_k: int = 3, allowed_hosts: Sequence[str] = ()
) -> Any:
    """Create the ASGI application.

    metadata: shown by /health. top_k: default number of passages. allowed_hosts: names that requests may have as Host
    or Origin, besides those that BrowserGuard always allows.
    """
    with require_extra("serving", "search"):
        import uvicorn  # noqa: F401  (needed to serve the application; reported here if it is missing)
        from starlette.applications import Starlette
        from starlette.requests import Request
        from starlette.responses import JSONResponse, Response
        from starlette.routing import Route

    async def answer(request: Request) -> Response:
        try:
            body = bytearray()
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BYTES:
                    return JSONResponse({"error": f"a request has at most {MAX_BYTES} bytes"}, 413)
            is_batch = request.url.path.endswith("/retrieve")
            return JSONResponse(await _run_request(batcher, parse_json(body), is_batch=is_batch, top_k=top_k))
        except SearchFailed as error:
            return JSONResponse({"error": str(error)}, 502)
        except ValueError as error:
            return JSONResponse({"error": str(error)}, 400)
        except Exception as error:
            return JSONResponse({"error": describe(error)}, 500)

    async def health(_: Request) -> Response:
        cache = {"hits": batcher.cache.hits, "misses": batcher.cache.misses}
        return JSONResponse({"status": "ok", **metadata, "batches": batcher.batches, "cache": cache})

    routes = [Route(path, answer, methods=["POST"]) for path in ("/retrieve", "/search")]
    hint = "; `agentfly search serve --allow-host NAME` allows more"
    return BrowserGuard(Starlette(routes=[*routes, Route("/health", health)]), allowed_hosts, hint)


async def _run_request(batcher: QueryBatcher, request: Any, *, is_batch: bool, top_k: int) -> dict[str, Any]:
    """Run a request of /retrieve (a batch of queries) or /search. Raises ValueError if it is malformed."""
    name, number_name = ("queries", "topk") if is_batch else ("query", "top_k")
    if not isinstance(request, Mapping) or name not in request:
        raise ValueError(f"a request is an object with {name}, not {request!r:.80}")
    k, queries = request.get(number_name), request[name]
    if k is None:
        k = top_k
    elif not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= MAX_PASSAGES:
        raise ValueError(f"{number_name} must be a whole number from 1 to {MAX_PASSAGES}, not {k!r:.80}")
    if not is_batch:
        if not isinstance(queries, str):
            raise ValueError(f"query must be a text, not {queries!r:.80}")
        return {"results": [_to_document(hit) for hit in await batcher.search(queries, k)]}
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        raise ValueError(f"queries must be a list of texts, not {queries!r:.80}")
    if len(queries) > MAX_QUERIES:
        raise ValueError(f"a request has at most {MAX_QUERIES} queries, not {len(queries)}")
    results = await asyncio.gather(*(batcher.search(query, k) for query in queries))
    if request.get("return_scores"):
        return {"result": [[{"document": _to_document(hit), "score": hit.score} for hit in hits] for hits in results]}
    return {"result": [[_to_document(hit) for hit in hits] for hits in results]}


def _to_document(hit: Hit) -> dict[str, Any]:
    passage = hit.passage
    return {"id": passage.id, "contents": passage.contents, "title": passage.title, "text": passage.text}
