"""AgentFly environments and tools as an MCP server, over stdio and streamable HTTP.

Every MCP session has its own leases: the first call of a tool that acts in an environment leases an instance from the
resource manager and resets it for the task; the end of the session releases it. An environment needs sessions, which
the protocol has over HTTP only before version 2026-07-28: newer clients are answered with the versions to fall back to.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import mcp_types
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS

from agentfly import __version__
from agentfly.environment import Environment
from agentfly.errors import EnvironmentFault, describe
from agentfly.gateway.http_server import BrowserGuard, RequestError, equals_key, read_key, read_request
from agentfly.resources import ResourceManager
from agentfly.tooling import Context, Tool, Toolbox, ToolResult
from agentfly.trajectory import CallStatus
from agentfly.types import Task, ToolCall

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send

_LOG = logging.getLogger(__name__)
PATH = "/mcp"
MAX_BYTES = 4 << 20
"""Maximum size of a request's body, in bytes."""
READ_SECONDS = 60.0
"""Time for a client to send a request."""
MAX_SESSIONS = 1000
_DATA_URI = re.compile(r"data:(image/[a-z0-9.+-]+);base64,", re.ASCII)
_VERSION_HEADER = b"mcp-protocol-version"


class ToolSession:
    """The calls of one MCP session, with the instances leased to it."""

    def __init__(self, toolbox: Toolbox, manager: ResourceManager, task: Task, name: str) -> None:
        self._toolbox = toolbox
        self._task = task
        self._group = manager.group()
        self._leases = manager.leases(task, toolbox.environments, group=self._group, chain=f"mcp {name}")
        self._lock = asyncio.Lock()
        """Actions in the environments are carried out one at a time, in the order in which they arrive."""
        self._turn = 0
        self._ended = False

    async def call(self, name: str, arguments: dict[str, Any]) -> mcp_types.CallToolResult:
        """Run a call, as in a chain. Every failure is a result with `is_error`."""
        tool = self._toolbox.find(ToolCall(name, arguments))
        if isinstance(tool, ToolResult):
            return to_call_result(tool)
        if not tool.environments:
            return to_call_result(await tool.run(arguments, context=self._context(), environments={}))
        async with self._lock:
            if self._ended:
                over = "Error: the task has ended; open a new session to start again."
                return to_call_result(ToolResult(over, CallStatus.SKIPPED, name=name))
            try:
                result = await self._leases.act(
                    tool.environments, lambda envs: tool.run(arguments, context=self._context(), environments=envs)
                )
            except EnvironmentFault as fault:
                await self._leases.release()
                lost = f"Error: the environment failed: {fault}. Its state is lost; the next call starts a new one."
                result = ToolResult(lost, CallStatus.ERROR, name=name)
            self._ended = result.ends_chain
            return to_call_result(result)

    def _context(self) -> Context:
        self._turn += 1
        return Context(self._task, turn=self._turn - 1)

    async def close(self) -> None:
        """Release the instances."""
        await self._leases.release()
        self._group.close()


class MCPApp:
    """Offers environments and tools to MCP clients. Use it as an async context manager, then `serve_stdio` or `app`."""

    def __init__(
        self,
        tools: Iterable[Tool | type[Environment] | str],
        *,
        name: str = "agentfly",
        task: Task | None = None,
        manager: ResourceManager | None = None,
        api_key: str = "",
        idle_seconds: float = 600.0,
    ) -> None:
        """
        Args:
            tools: As for an agent: tools, environment classes, names.
            name: Name of the server.
            task: What environments are reset for; clients read its question in the server's instructions.
            manager: Leases the instances; None: one of its own, closed at the end.
            api_key: Key that HTTP clients must send as `Authorization: Bearer`; empty: none.
            idle_seconds: Time without a request after which the session of an HTTP client is closed.
        """
        self.toolbox = Toolbox(tools)
        self.name = name
        self._task = task or Task((), {}, "no task")
        self._manager = manager or ResourceManager()
        self._owns_manager = manager is None
        self._key = api_key
        self._sessions: dict[Any, ToolSession] = {}
        self.server: Server[Any] = Server(
            name,
            version=__version__,
            instructions=self._task.question or None,
            on_list_tools=self._list_tools,
            on_call_tool=self._call_tool,
        )
        self._http = StreamableHTTPSessionManager(
            self.server,
            session_idle_timeout=idle_seconds,
            max_request_body_size=MAX_BYTES,
            max_sessions=MAX_SESSIONS,
        )

    @property
    def num_sessions(self) -> int:
        """Sessions that have made a call and are open."""
        return len(self._sessions)

    async def __aenter__(self) -> MCPApp:
        return self

    async def __aexit__(self, *_: object) -> None:
        for session in list(self._sessions.values()):
            await session.close()
        self._sessions.clear()
        if self._owns_manager:
            await self._manager.close()

    async def serve_stdio(self) -> None:
        """Serve one client over stdin and stdout, until it closes them. What the tools print goes to stderr."""
        async with stdio_server() as (received, to_send):
            await self.server.run(received, to_send, self.server.create_initialization_options())

    @asynccontextmanager
    async def app(self) -> AsyncIterator[Callable[[Scope, Receive, Send], Any]]:
        """The ASGI application, while it can be used. Without a key, requests that a web page sends are refused."""

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:  # uvicorn takes no method
            await self._answer(scope, receive, send)

        async with self._http.run():
            yield answer if self._key else BrowserGuard(answer)

    async def _list_tools(self, _: Any, __: Any) -> mcp_types.ListToolsResult:
        tools = []
        for schema in self.toolbox.schemas:
            function = schema["function"]
            tools.append(
                mcp_types.Tool(
                    name=function["name"], description=function["description"], input_schema=function["parameters"]
                )
            )
        return mcp_types.ListToolsResult(tools=tools)

    async def _call_tool(self, context: Any, params: mcp_types.CallToolRequestParams) -> mcp_types.CallToolResult:
        # Nothing public leads from a request to its connection, whose exit stack runs when the session has ended.
        connection = context.session._connection
        key = connection.session_id  # None over stdio, where a process is a session
        session = self._sessions.get(key)
        if session is None:
            session = self._sessions[key] = ToolSession(self.toolbox, self._manager, self._task, key or "stdio")
            if key is not None:
                connection.exit_stack.push_async_callback(self._close_session, key)
        try:
            return await session.call(params.name, dict(params.arguments or {}))
        except Exception as error:
            _LOG.exception("a call of %s failed", params.name)
            failed = ToolResult(f"Error: {describe(error)}", CallStatus.ERROR, name=params.name)
            return to_call_result(failed)

    async def _close_session(self, key: str) -> None:
        if (session := self._sessions.pop(key, None)) is not None:
            await session.close()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request and pass it to the `mcp` package."""
        if scope["type"] != "http":
            return
        status, problem, code, data = 0, "", mcp_types.INVALID_REQUEST, None
        version = dict(scope["headers"]).get(_VERSION_HEADER, b"").decode("latin-1")
        body = bytearray()
        if self._key and not equals_key(read_key(scope["headers"]), self._key):
            status, problem = 401, "the API key is not valid here"
        elif scope["path"].rstrip("/") != PATH:
            status, problem = 404, f"there is no {scope['path'][:100]!r}; there is {PATH}"
        elif version and version not in HANDSHAKE_PROTOCOL_VERSIONS and self.toolbox.environments:
            supported = list(HANDSHAKE_PROTOCOL_VERSIONS)
            status, problem, code = 400, "an environment needs a session", mcp_types.UNSUPPORTED_PROTOCOL_VERSION
            data = {"supported": supported, "requested": version[:100]}
        else:
            try:
                body = await read_request(receive, MAX_BYTES, READ_SECONDS)
            except RequestError as error:
                status, problem = error.status, str(error)
            except ConnectionError:
                return
        if status:
            await _send_error(send, status, {"code": code, "message": problem, **({"data": data} if data else {})})
            return
        unread: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def replay() -> Message:
            return unread.pop() if unread else await receive()

        await self._http.handle_request(scope, replay, send)


async def _send_error(send: Send, status: int, error: dict[str, Any]) -> None:
    body = json.dumps({"jsonrpc": "2.0", "id": None, "error": error}).encode()
    # The rest of the request may not have been read, so the connection cannot be used again.
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def to_call_result(result: ToolResult) -> mcp_types.CallToolResult:
    """Convert the result of a tool: text and images. Other values are not sent: they may contain the solution."""
    blocks = (result.observation,) if isinstance(result.observation, str) else result.observation
    content: list[Any] = []
    for block in blocks:
        if isinstance(block, str):
            content.append(mcp_types.TextContent(text=block))
        elif data_uri := _DATA_URI.match(block.url):
            content.append(mcp_types.ImageContent(data=block.url[data_uri.end() :], mime_type=data_uri[1]))
        else:
            content.append(mcp_types.TextContent(text=f"[image at {block.url}]"))
    return mcp_types.CallToolResult(content=content, is_error=result.status is not CallStatus.OK)
