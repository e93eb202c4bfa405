"""A real HTTP server on loopback with the OpenAI API and canned responses."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

Reply = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True)
class Seen:
    """A request that arrived."""

    path: str
    body: dict[str, Any]
    headers: Mapping[str, str]


class OpenAIServer:
    """Answers each path with the replies given for it, in order; the last one again and again."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self.arrived = threading.Event()
        self.disconnected = threading.Event()
        self._replies: dict[str, list[Reply]] = {}
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/v1"
        app = Starlette(routes=[Route("/v1/{path:path}", self._answer, methods=["GET", "POST"])])
        self._server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off"))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]})

    def start(self) -> None:
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()

    def reset(self) -> None:
        self.seen.clear()
        self.arrived.clear()
        self.disconnected.clear()
        self._replies.clear()

    def answers(self, path: str, *replies: Reply) -> None:
        self._replies[path] = list(replies)

    def bodies(self, path: str) -> list[dict[str, Any]]:
        return [seen.body for seen in self.seen if seen.path == path]

    def left_alone(self) -> bool:
        """Whether every connection closes within a minute."""
        patience = time.monotonic() + 60
        while self._server.server_state.connections and time.monotonic() < patience:
            time.sleep(0.01)
        return not self._server.server_state.connections

    def waits_forever(self) -> Reply:
        """Never answer; notice when the client goes away."""

        async def reply(request: Request) -> Response:
            await request.receive()  # the body has been read: next comes the disconnection
            self.disconnected.set()
            return Response(status_code=499)

        return reply

    async def _answer(self, request: Request) -> Response:
        path = "/" + request.path_params["path"]
        body = await request.body()
        self.seen.append(Seen(path, json.loads(body) if body else {}, dict(request.headers)))
        self.arrived.set()
        replies = self._replies.get(path)
        if not replies:
            return JSONResponse({"error": {"message": f"no {path} here"}}, status_code=404)
        reply = replies.pop(0) if len(replies) > 1 else replies[0]
        return await reply(request)


def says(data: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Reply:
    async def reply(request: Request) -> Response:
        return JSONResponse(data, status_code=status, headers=dict(headers or {}))

    return reply


def refuses(message: str, status: int = 400, headers: Mapping[str, str] | None = None) -> Reply:
    error = {"message": message, "type": "BadRequestError", "code": status}
    return says({"error": error}, status, headers)


def writes(text: str, status: int = 200) -> Reply:
    async def reply(request: Request) -> Response:
        return Response(text, status_code=status, media_type="text/html")

    return reply


def sends(*pieces: bytes, status: int = 200, repeat: int = 0, **headers: str) -> Reply:
    """Send raw bytes as JSON, one write each; the last one is repeated `repeat` times."""

    async def body() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece
        for _ in range(repeat):
            yield pieces[-1]
            await asyncio.sleep(0)

    async def reply(request: Request) -> Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return StreamingResponse(body(), status, named, media_type="application/json")

    return reply


def streams(*pieces: bytes, cut: bool = False) -> Reply:
    """Send the pieces as they are, one write each; `cut` drops the connection after the last."""

    async def reply(request: Request) -> Response:
        async def body() -> AsyncIterator[bytes]:
            for piece in pieces:
                yield piece
                await asyncio.sleep(0.005)
            if cut:
                raise ConnectionAbortedError

        return StreamingResponse(body(), media_type="text/event-stream")

    return reply


def event(data: object) -> bytes:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n".encode()


def completion(
    ids: Sequence[int] | None = (7, 8),
    logprobs: Sequence[float | None] | None = (-0.5, -0.25),
    finish: str | None = "stop",
    **fields: object,
) -> dict[str, Any]:
    """An answer of /completions, or one chunk of it."""
    choice: dict[str, Any] = {"index": 0, "text": "…", "finish_reason": finish, **fields}
    if ids is not None:
        choice["token_ids"] = list(ids)
    if logprobs is not None:
        choice["logprobs"] = {"tokens": ["…"] * len(logprobs), "token_logprobs": list(logprobs)}
    return {"object": "text_completion", "choices": [choice]}


def chat(
    message: Mapping[str, Any],
    finish: str = "stop",
    ids: Sequence[int] | None = None,
    logprobs: Sequence[float] | None = None,
    prompt: Sequence[int] | None = None,
) -> dict[str, Any]:
    """An answer of /chat/completions."""
    choice: dict[str, Any] = {
        "index": 0,
        "message": {"role": "assistant", **message},
        "finish_reason": finish,
    }
    if ids is not None:
        choice["token_ids"] = list(ids)
    if logprobs is not None:
        choice["logprobs"] = {"content": [{"token": "…", "logprob": value} for value in logprobs]}
    data: dict[str, Any] = {"object": "chat.completion", "choices": [choice]}
    if prompt is not None:
        data["prompt_token_ids"] = list(prompt)
    return data
