"""How messages reach an MCP server: over the standard streams of a process, or over HTTP. Both bound a message's size.

The `mcp` package's own stdio transport buffers a line of any length and lets the server's children survive a kill of
this process. Here a guardian process ends them, a line has at most `max_bytes`, and the end of stderr is kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import anyio
import httpx2
import mcp_types
from mcp.client.stdio import get_default_environment
from mcp.shared.message import SessionMessage

from agentfly.errors import describe, sanitize
from agentfly.resources.guarded import GuardedProcess

TOO_LARGE = -32099
"""Error code, from the range that JSON-RPC leaves to implementations, of a result that is larger than allowed."""
END_SECONDS = 2.0
"""Time for a server to end by itself after its stdin was closed; then its guardian ends it."""
_CHUNK = 1 << 16
_KEPT = 256
"""Bytes kept of the beginning and the end of a line that is too long: the request's id is in one of them."""
_STDERR_BYTES = 4096
_MAX_UNASKED = 4
"""Factor: messages of this many times `max_bytes` without an answer among them are a flood."""
_IDS = (
    re.compile(rb'^\{"jsonrpc": ?"2\.0", ?"id": ?(\d+)[,}]'),
    re.compile(rb'"jsonrpc": ?"2\.0", ?"id": ?(\d+)\}\s*$'),
    re.compile(rb'"id": ?(\d+), ?"jsonrpc": ?"2\.0"\}\s*$'),
)


class StdioTransport:
    """A server as a child process that speaks over stdin and stdout, one JSON message per line."""

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str], cwd: str, max_bytes: int) -> None:
        self._command = list(command)
        self._env = {**get_default_environment(), **env}
        self._cwd = cwd
        self._max_bytes = max_bytes
        self._process: GuardedProcess | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._stderr = b""
        self._problem = ""

    @property
    def pid(self) -> int | None:
        """Process id of the guardian, whose only child at first is the server; None before the start."""
        return self._process.pid if self._process else None

    @property
    def failure(self) -> str:
        """Why no message can be exchanged any more, with the end of stderr; empty while the server runs."""
        process = self._process
        if process is None or (process.returncode is None and not self._problem):
            return ""
        reason = self._problem
        if not reason and process.returncode is not None:
            code = process.returncode
            reason = f"it was killed by signal {code - 128}" if code > 128 else f"it ended with exit code {code}"
        return f"{reason}; the end of its stderr:\n{self.stderr}" if self.stderr else f"{reason}; its stderr is empty"

    @property
    def stderr(self) -> str:
        """The end of what the server wrote to stderr."""
        return sanitize(self._stderr.decode(errors="replace")).strip()

    async def __aenter__(self) -> tuple[Any, Any]:
        self._process = await GuardedProcess.start(self._command, env=self._env, cwd=self._cwd)
        self._received, received = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        to_send, self._to_send = anyio.create_memory_object_stream[SessionMessage](0)
        self._tasks = [
            asyncio.create_task(work()) for work in (self._read_stdout, self._write_stdin, self._read_stderr)
        ]
        return received, to_send

    async def __aexit__(self, *_: object) -> None:
        process = self._process
        assert process is not None
        try:
            process.stdin.close()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), END_SECONDS)
        finally:
            try:
                await process.end()
            finally:
                for task in self._tasks:
                    task.cancel()
                self._received.close()
                self._to_send.close()
                await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _write_stdin(self) -> None:
        assert self._process is not None
        try:
            async for sent in self._to_send:
                line = sent.message.model_dump_json(by_alias=True, exclude_unset=True)
                self._process.stdin.write(line.encode() + b"\n")
                await self._process.stdin.drain()
        except (ConnectionError, anyio.ClosedResourceError):
            pass  # the server reads no more; the end of its output says why
        except Exception as error:
            self._problem = f"a message could not be sent: {describe(error)}"
            self._received.close()  # requests without an answer fail

    async def _read_stderr(self) -> None:
        assert self._process is not None
        while data := await self._process.stderr.read(_CHUNK):
            self._stderr = (self._stderr + data)[-_STDERR_BYTES:]

    async def _read_stdout(self) -> None:
        assert self._process is not None
        unasked = 0
        try:
            async for line, size in self._read_lines():
                message = self._parse(line, size)
                answer = isinstance(message, mcp_types.JSONRPCResponse | mcp_types.JSONRPCError)
                unasked = 0 if answer else unasked + size
                if unasked > _MAX_UNASKED * self._max_bytes:
                    raise ValueError(f"it wrote {unasked:,} bytes to stdout that answer no request")
                if message is not None:
                    await self._received.send(SessionMessage(message))
            # The end of the output is not the end of the process; wait for it, for its exit code.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), END_SECONDS)
            self._problem = "" if self._process.returncode is not None else "it closed its stdout"
        except ValueError as error:
            self._problem = str(error)
        except anyio.BrokenResourceError:
            pass  # the session has ended
        finally:
            self._received.close()  # requests without an answer fail

    async def _read_lines(self) -> AsyncIterator[tuple[bytes, int]]:
        """Each line with its size; of a line above `max_bytes`, only its beginning and its end."""
        assert self._process is not None
        line, size = bytearray(), 0
        while chunk := await self._process.stdout.read(_CHUNK):
            lines = chunk.split(b"\n")
            for index, fragment in enumerate(lines):
                size += len(fragment)
                line += fragment
                if size > self._max_bytes:
                    line = line[:_KEPT] + line[-_KEPT:]
                if size > _MAX_UNASKED * self._max_bytes:
                    raise ValueError(f"it sent {size:,} bytes of one message; at most {self._max_bytes:,} are read")
                if index < len(lines) - 1:
                    yield bytes(line), size
                    line, size = bytearray(), 0

    def _parse(self, line: bytes, size: int) -> mcp_types.JSONRPCMessage | None:
        """The message of a line; None if it is not a message, such as a log. Raises ValueError if it is too large."""
        if size > self._max_bytes:
            id_match = next((match for pattern in _IDS if (match := pattern.search(line))), None)
            if id_match is None:
                raise ValueError(f"it sent a message of {size:,} bytes; at most {self._max_bytes:,} are read")
            reason = f"the result has {size:,} bytes; at most {self._max_bytes:,} are read"
            error = mcp_types.ErrorData(code=TOO_LARGE, message=reason)
            return mcp_types.JSONRPCError(jsonrpc="2.0", id=int(id_match[1]), error=error)
        try:
            return mcp_types.jsonrpc_message_adapter.validate_json(line, by_name=False)
        except ValueError:
            return None


class _BoundedStream(httpx2.AsyncByteStream):
    """The body of a response, up to a number of bytes."""

    def __init__(self, stream: Any, max_bytes: int) -> None:
        self._stream = stream
        self._max_bytes = max_bytes

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        async for chunk in self._stream:
            size += len(chunk)
            if size > self._max_bytes:
                raise httpx2.StreamError(f"the response has more than {self._max_bytes:,} bytes")
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()


class BoundedHTTP(httpx2.AsyncHTTPTransport):
    """HTTP with responses of at most `max_bytes`, none of them compressed. Events are bounded by the MCP transport."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__()
        self._max_bytes = max_bytes

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        response = await super().handle_async_request(request)
        if response.headers.get("content-encoding", "identity") != "identity":
            await response.aclose()
            raise httpx2.StreamError("the response is compressed, which was not asked for")
        if not response.headers.get("content-type", "").startswith("text/event-stream"):
            response.stream = _BoundedStream(response.stream, self._max_bytes)
        return response
