"""The ASGI application of a gateway, and the uvicorn server that runs it.

    POST /v1/chat/completions, /v1/responses, /v1/messages, /v1/completions
    GET  /v1/models, /health, /metrics

A request is bounded in size and time, belongs to the session of its key, and ends when its client is gone. The
application answers whatever it is sent: an unexpected exception is logged and answered with status 500.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import h11
import uvicorn
from starlette.datastructures import Headers
from starlette.responses import JSONResponse, StreamingResponse
from uvicorn.protocols.http.h11_impl import H11Protocol

from agentfly.backends.base import Backend
from agentfly.gateway import anthropic_messages, chat_completions, responses
from agentfly.gateway.chat import ApiError, ChatRequest, Delta, parse_body, run_unblocked
from agentfly.gateway.http_server import BrowserGuard, RequestError, read_key, read_request
from agentfly.gateway.session import GatewaySession, TemplateCache

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

Result = TypeVar("Result")
_LOG = logging.getLogger(__name__)
MAX_BYTES = 32 << 20
"""Maximum size of a request's body, in bytes."""
READ_SECONDS = 60.0
"""Time for the headers of a request, and again for its body."""
WRITE_SECONDS = 60.0
"""Time for a client to take what is buffered of a response."""
IDLE_SECONDS = 120
"""Time for which a connection without a request is kept."""
CHAIN_HEADER = "x-agentfly-chain"
"""Tells the chains of clients apart that share the gateway's own key."""
_APIS: dict[str, tuple[Any, Any]] = {
    "/v1/chat/completions": (chat_completions, chat_completions.ChatCompletionsStream),
    "/v1/responses": (responses, responses.ResponsesStream),
    "/v1/messages": (anthropic_messages, anthropic_messages.MessagesStream),
}
Respond = Callable[["Scope", "Receive", "Send"], Awaitable[None]]


class ServedGateway(Protocol):
    """What the application needs of a gateway."""

    model: str
    backend: Backend
    templates: TemplateCache

    @property
    def takes_any_key(self) -> bool: ...

    def authenticate(self, key: bytes) -> GatewaySession | None:
        """The session of a chain's key; None for the gateway's own. Raises ApiError."""

    def get_session(self, key: bytes, chain: str) -> GatewaySession:
        """The session of a chain of clients with the gateway's own key. Raises ApiError."""

    def metrics(self) -> dict[str, float]: ...


class GatewayApp:
    """The ASGI application."""

    def __init__(self, gateway: ServedGateway) -> None:
        self._gateway = gateway
        self._guard = BrowserGuard(self)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path = scope["path"].replace("/v1/v1/", "/v1/")  # clients of Anthropic append /v1 to a base URL
        of_anthropic = path.startswith("/v1/messages")
        format_error = (anthropic_messages if of_anthropic else chat_completions).format_error
        respond: Respond
        try:
            respond = await self._answer(path, scope, receive)
        except ApiError as error:
            # The rest of the request was not read, so the connection cannot be used again.
            headers = {"connection": "close"} if error.status in (408, 413) else None
            respond = JSONResponse(format_error(error), error.status, headers)
        except ConnectionError:
            return  # the client is gone
        except Exception as error:
            _LOG.exception("a request to %s failed", path)
            internal = ApiError(f"internal error: {type(error).__name__}", 500, "internal")
            respond = JSONResponse(format_error(internal), 500)
        await respond(scope, receive, send)

    async def _answer(self, path: str, scope: Scope, receive: Receive) -> Respond:
        """The response to a request. Raises ApiError."""
        gateway = self._gateway
        headers = Headers(scope=scope)
        if gateway.takes_any_key and (problem := self._guard.reject_reason(headers)):
            raise ApiError(problem, 403, "forbidden")
        if path == "/health":
            return JSONResponse({"status": "ok"})
        key = read_key(scope["headers"])
        session = gateway.authenticate(key)
        if path in ("/metrics", "/v1/models"):
            if scope["method"] != "GET":
                raise ApiError(f"{path} is read with GET", 405, "method_not_allowed")
            if path == "/metrics":
                return JSONResponse(gateway.metrics())
            card = {"id": gateway.model, "object": "model", "created": 0, "owned_by": "agentfly"}
            return JSONResponse({"object": "list", "data": [{**card, "max_model_len": gateway.backend.context_length}]})
        if path not in _APIS and path != "/v1/completions":
            raise ApiError(f"there is no {path[:100]!r}; there are {', '.join(_APIS)}", 404, "not_found")
        if scope["method"] != "POST":
            raise ApiError(f"{path} takes POST", 405, "method_not_allowed")
        if session is None:  # only now: a request that samples nothing creates no chain
            session = gateway.get_session(key, headers.get(CHAIN_HEADER, "")[:200])
        data = await _read_body(headers, receive)
        if path == "/v1/completions":
            return await self._complete_tokens(session, data, receive)
        api, make_writer = _APIS[path]
        request = await run_unblocked(len(data), lambda: api.parse_request(parse_body(data)))
        if not request.stream:
            return JSONResponse(api.format_reply(await run_while_connected(session.complete(request), receive)))
        stream = TurnStream(session, request, make_writer(request))
        await stream.admit()
        return stream

    async def _complete_tokens(self, session: GatewaySession, data: bytearray, receive: Receive) -> Respond:
        """The response to a request of /completions; a stream has one event, since its log-probabilities come last."""
        template = self._gateway.templates.base
        request = await run_unblocked(len(data), lambda: chat_completions.parse_completion(parse_body(data), template))
        out = chat_completions.format_completion(await run_while_connected(session.complete(request), receive))
        if not request.stream:
            return JSONResponse(out)
        return StreamingResponse(iter([_encode_event(out), _encode_event("[DONE]")]), media_type="text/event-stream")


async def _read_body(headers: Headers, receive: Receive) -> bytearray:
    # A web page cannot send JSON to another site without a preflight request, which is not answered.
    if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError("the content-type must be application/json", 415, "unsupported_media_type")
    if headers.get("content-encoding", "identity") != "identity":
        raise ApiError("a compressed request is not supported; send it uncompressed", 415, "unsupported_media_type")
    try:
        return await read_request(receive, MAX_BYTES, READ_SECONDS)
    except RequestError as error:
        raise ApiError(str(error), error.status, "request_too_large" if error.status == 413 else "timeout") from None


async def run_while_connected(work: Coroutine[Any, Any, Result], receive: Receive) -> Result:
    """Run the work of a request; if the client closes the connection meanwhile, cancel it and raise ConnectionError."""
    task = asyncio.create_task(work)

    async def wait_for_disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    watcher = asyncio.create_task(wait_for_disconnect())
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ConnectionError("the client closed the connection")
        return get_result(task)
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


def get_result(task: asyncio.Task[Result]) -> Result:
    """The result of a task that has ended. Raises its exception; ApiError if the session has cancelled it."""
    if task.cancelled():
        raise ApiError("the chain has ended", 503, "chain_ended")
    return task.result()


class TurnStream(StreamingResponse):
    """A turn as server-sent events, written as they become certain. A client that is gone aborts the turn."""

    def __init__(self, session: GatewaySession, request: ChatRequest, writer: Any) -> None:
        super().__init__(self._events(), media_type="text/event-stream")
        self._writer = writer
        self._queue: asyncio.Queue[list[Delta] | None] = asyncio.Queue()
        """Deltas of the turn; None when it has ended."""
        self._work = asyncio.create_task(session.complete(request, lambda deltas: self._queue.put_nowait(list(deltas))))
        self._work.add_done_callback(lambda _: self._queue.put_nowait(None))

    async def admit(self) -> None:
        """Wait until the turn may be sampled. Raises ApiError if it is refused, so that the status can say so."""
        try:
            if await self._queue.get() is None:
                get_result(self._work)
        except BaseException:
            await self._abort()
            raise

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            # Not in `_events`: a generator that was never started has no `finally`, and the turn would go on.
            await self._abort()

    async def _events(self) -> AsyncIterator[bytes]:
        writer = self._writer
        for event in writer.start():
            yield _encode_event(event)
        while (deltas := await self._queue.get()) is not None:
            # What has queued up becomes one write: with one per token, a slow client would fall behind ever further.
            while not self._queue.empty() and (later := self._queue.get_nowait()) is not None:
                deltas += later
            if out := b"".join(_encode_event(event) for delta in deltas for event in writer.add(delta)):
                yield out
            if self._work.done() and self._queue.empty():
                break
        events: Iterable[Any]
        try:
            if not self._work.done():
                await asyncio.wait((self._work,))
            events = writer.finish(get_result(self._work))
        except ApiError as error:
            events = writer.fail(error)
        yield b"".join(map(_encode_event, events))

    async def _abort(self) -> None:
        self._work.cancel()
        await asyncio.gather(self._work, return_exceptions=True)


def _encode_event(event: Mapping[str, Any] | str) -> bytes:
    """A server-sent event; those with a type are named by it."""
    if isinstance(event, str):
        return f"data: {event}\n\n".encode()
    name = f"event: {event['type']}\n" if "type" in event else ""
    return f"{name}data: {json.dumps(event, ensure_ascii=False)}\n\n".encode("utf-8", "surrogatepass")


class _TimedProtocol(H11Protocol):
    """Cuts off clients that do not send the headers of a request, or do not take a response, in time."""

    _headers_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._headers_timer = self.loop.call_later(READ_SECONDS, transport.abort)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        waiting = self.conn.their_state is h11.IDLE and (self.cycle is None or self.cycle.response_complete)
        if waiting and self._headers_timer is None:
            self._headers_timer = self.loop.call_later(READ_SECONDS, self.transport.abort)
        elif not waiting and self._headers_timer is not None:
            self._headers_timer.cancel()
            self._headers_timer = None

    def pause_writing(self) -> None:
        """The client reads more slowly than the response is written."""
        super().pause_writing()
        self._write_timer = self.loop.call_later(WRITE_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._headers_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)


class BackgroundServer(uvicorn.Server):
    """Installs no signal handlers, and reports when it listens."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        self._on_ready()


def make_server(app: ASGIApp, on_ready: Callable[[], None]) -> uvicorn.Server:
    """A server that cuts off slow clients and installs no signal handlers; `on_ready` is called when it listens."""
    config = uvicorn.Config(
        app,
        http=_TimedProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level=logging.CRITICAL,
        access_log=False,
        timeout_keep_alive=IDLE_SECONDS,
        timeout_graceful_shutdown=2,
    )
    return BackgroundServer(config, on_ready)
