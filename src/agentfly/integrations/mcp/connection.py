"""One connection to an MCP server: opened, used and closed from any task of one event loop.

The client of the `mcp` package must be closed by the task that opened it, so a task of the connection's own holds it.
A failure of the server or of the transport raises EnvironmentFault with the reason; a response of the server, also an
error, is returned.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2
import mcp_types
import pydantic
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS, MODERN_PROTOCOL_VERSIONS

from agentfly import __version__
from agentfly.errors import ConfigError, EnvironmentFault, describe
from agentfly.integrations.mcp.transport import TOO_LARGE, BoundedHTTP, StdioTransport
from agentfly.validation import describe_invalid

MAX_PAGES = 100
"""Pages of a tool list that are read."""
_LOST = ("Session terminated", "Server returned an error response")
"""Messages with which the `mcp` package reports HTTP errors that the server did not explain."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a server is, and how to talk to it."""

    name: str
    """For messages."""
    command: tuple[str, ...] = ()
    url: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    cwd: str = "."
    sessions: bool = True
    """Whether the connection needs a session of its own: over HTTP, protocols from 2026-07-28 on have none."""
    max_bytes: int = 16 << 20
    start_timeout: float = 60.0

    @property
    def where(self) -> str:
        return self.url or " ".join(self.command)


class Connection:
    """A connection to a server. Make one with `open`."""

    def __init__(self, endpoint: Endpoint, on_change: Callable[[], None]) -> None:
        self._endpoint = endpoint
        self._on_change = on_change
        self._stop = asyncio.Event()
        self._stdio: StdioTransport | None = None
        self._lost = ""
        self._client: Client
        self._task: asyncio.Task[None]

    @classmethod
    async def open(cls, endpoint: Endpoint, on_change: Callable[[], None] = lambda: None) -> Connection:
        """Connect to the server, starting it if it is a command. `on_change`: called when its tool list changes.

        Raises EnvironmentFault if it does not start, does not answer, or supports none of our protocol versions.
        """
        connection = cls(endpoint, on_change)
        ready: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        connection._task = asyncio.create_task(connection._hold(ready))
        try:
            async with asyncio.timeout(endpoint.start_timeout) as limit:
                connection._client = await asyncio.shield(ready)
        except BaseException as error:
            connection._task.cancel()  # it may wait for the server
            await connection.close()
            if not isinstance(error, Exception):
                raise
            problem = connection._describe_failure(error)
            if limit.expired():
                problem = f"it did not answer within {endpoint.start_timeout:g} s" + connection._stderr_note()
            raise EnvironmentFault(
                f"the MCP server {endpoint.name} ({endpoint.where}) does not start: {problem}"
            ) from error
        return connection

    @property
    def pid(self) -> int | None:
        """Process id of the server's guardian; None for HTTP."""
        return self._stdio.pid if self._stdio else None

    @property
    def failure(self) -> str:
        """Why the connection cannot be used any more; empty as far as it can be used."""
        return self._lost or (self._stdio.failure if self._stdio else "")

    async def list_tools(self) -> list[mcp_types.Tool]:
        """All tools of the server."""
        tools: list[mcp_types.Tool] = []
        cursor: str | None = None
        for _ in range(MAX_PAGES):
            page = await self._request(self._client.list_tools(cursor=cursor, cache_mode="refresh"))
            tools += page.tools
            cursor = page.next_cursor
            if cursor is None:
                return tools
        raise EnvironmentFault(f"the tool list of {self._endpoint.name} has more than {MAX_PAGES} pages")

    async def call_tool(
        self, name: str, arguments: Mapping[str, Any], timeout: float
    ) -> tuple[mcp_types.CallToolResult, list[str]]:
        """Call a tool; return its result and the texts of its progress.

        timeout: seconds without an answer or progress. Raises TimeoutError after it, EnvironmentFault if the connection
        is lost, RuntimeError if the server answers with an error of its own or with an invalid result. An error about
        the call itself is returned as a result with `is_error`.
        """
        reports: list[str] = []
        limit = asyncio.timeout(timeout)

        async def on_progress(progress: float, total: float | None, message: str | None) -> None:
            limit.reschedule(asyncio.get_running_loop().time() + timeout)
            del reports[50:]
            reports.append(f"{progress:g}/{total:g}" if total is not None else f"{progress:g}")
            reports[-1] += f" {message[:200]}" if message else ""

        try:
            async with limit:
                call = self._client.call_tool(name, dict(arguments), progress_callback=on_progress)
                return await self._request(call), reports
        except MCPError as error:
            if error.code not in (mcp_types.INVALID_PARAMS, mcp_types.METHOD_NOT_FOUND, TOO_LARGE):
                raise RuntimeError(f"the MCP server answered with error {error.code}: {error.message}") from error
            content = mcp_types.TextContent(text=error.message)
            return mcp_types.CallToolResult(content=[content], is_error=True), reports

    async def close(self) -> None:
        """End the connection; a server that is a command ends with all its processes. May be called again."""
        self._stop.set()
        if not self._task.done():
            try:
                await asyncio.wait((self._task,), timeout=30.0)
            except asyncio.CancelledError:
                self._task.cancel()
                raise
        if not self._task.done():
            self._task.cancel()
        self._lost = self._lost or "it is closed"

    async def _request(self, request: Awaitable[Any]) -> Any:
        """Await a request. Raises EnvironmentFault if the connection is lost."""
        try:
            return await request
        except MCPError as error:
            lost = error.code == mcp_types.CONNECTION_CLOSED or error.message in _LOST or self.failure
            if not lost:
                raise
            await asyncio.sleep(0)
            self._lost = self._describe_failure(error)
            raise EnvironmentFault(f"the MCP server {self._endpoint.name} is lost: {self._lost}") from error
        except (httpx2.HTTPError, OSError) as error:
            if isinstance(error, TimeoutError):
                raise
            self._lost = describe(error)
            raise EnvironmentFault(f"the MCP server {self._endpoint.name} is lost: {self._lost}") from error
        except pydantic.ValidationError as error:
            raise RuntimeError(f"the MCP server sent a malformed result: {describe_invalid(error):.500}") from error

    async def _hold(self, ready: asyncio.Future[Client]) -> None:
        """Open the client, keep it until `close`, and close it."""
        endpoint = self._endpoint
        mode = "legacy" if endpoint.url and endpoint.sessions else "auto"
        info = mcp_types.Implementation(name="agentfly", version=__version__)
        try:
            async with contextlib.AsyncExitStack() as stack:
                transport = await stack.enter_async_context(self._make_transport())
                client = Client(transport, mode=mode, client_info=info, message_handler=self._receive, cache=None)
                async with client:
                    ready.set_result(client)
                    await self._stop.wait()
        except Exception as error:
            leaf: BaseException = error
            while isinstance(leaf, BaseExceptionGroup):
                leaf = leaf.exceptions[0]
            self._lost = self._lost or describe(leaf)
            if not ready.done():
                ready.set_exception(leaf)
                ready.exception()  # `open` may have given up already

    @contextlib.asynccontextmanager
    async def _make_transport(self) -> AsyncIterator[Any]:
        endpoint = self._endpoint
        if endpoint.command:
            self._stdio = StdioTransport(
                endpoint.command, env=endpoint.env, cwd=endpoint.cwd, max_bytes=endpoint.max_bytes
            )
            yield self._stdio
            return
        headers = {**endpoint.headers, "accept-encoding": "identity"}
        timeout = httpx2.Timeout(30.0, read=None)  # calls have a timeout of their own
        async with httpx2.AsyncClient(
            headers=headers, timeout=timeout, transport=BoundedHTTP(endpoint.max_bytes)
        ) as client:
            yield streamable_http_client(endpoint.url, http_client=client, max_sse_event_size=endpoint.max_bytes)

    async def _receive(self, message: Any) -> None:
        """Handle a notification of the server."""
        if isinstance(message, mcp_types.ToolListChangedNotification):
            self._on_change()

    def _describe_failure(self, error: BaseException) -> str:
        closed = isinstance(error, OSError) or (
            isinstance(error, MCPError) and error.code == mcp_types.CONNECTION_CLOSED
        )
        if closed and self._stdio is not None and self._stdio.failure:
            return self._stdio.failure
        text = describe(error)
        if "protocol version" in text.lower():
            versions = ", ".join([*HANDSHAKE_PROTOCOL_VERSIONS, *MODERN_PROTOCOL_VERSIONS])
            text += f"; this client speaks the protocol versions {versions}"
            if self._endpoint.url and self._endpoint.sessions:
                text += "; newer versions have no sessions over HTTP: set stateful = False if the server keeps no state"
            return text
        return text + self._stderr_note()

    def _stderr_note(self) -> str:
        stderr = self._stdio.stderr if self._stdio else ""
        return f"; the end of its stderr:\n{stderr}" if stderr else ""


def require_command_or_url(command: Sequence[str], url: str, name: str) -> None:
    """Raise ConfigError unless either a command or a URL is given."""
    if isinstance(command, str) or not all(isinstance(argument, str) for argument in command):
        raise ConfigError(f'{name}: command is a list such as ["uvx", "mcp-server-time"], not {command!r}')
    if bool(command) == bool(url):
        both = "both a command and a url" if url else "neither a command nor a url"
        raise ConfigError(f'{name} has {both}; set command = ["uvx", "mcp-server-time"] or url = "https://…/mcp"')
    if url and not url.startswith(("http://", "https://")):
        raise ConfigError(f"{name}.url must begin with http:// or https://, not {url!r}")
