"""`agentfly mcp`: offer environments and tools to MCP clients, and list the tools of MCP servers."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
from typing import TYPE_CHECKING, Annotated

import typer

from agentfly.cli.env import TaskFile, TaskQuestion, TaskRow
from agentfly.cli.serve import ApiKey, Host
from agentfly.errors import ConfigError

if TYPE_CHECKING:
    from agentfly.environment import Environment
    from agentfly.integrations.mcp import MCPApp
    from agentfly.tooling import Tool

app = typer.Typer(
    help="Offer environments and tools to MCP clients, and list the tools of MCP servers.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command("serve")
def serve_command(
    names: Annotated[
        list[str],
        typer.Argument(metavar="NAME…", help="Environments and tools: installed, module:name, or file.py:name."),
    ],
    http: Annotated[bool, typer.Option("--http", help="Serve streamable HTTP instead of stdin and stdout.")] = False,
    host: Host = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port.")] = 8000,
    api_key: ApiKey = None,
    question: TaskQuestion = None,
    task: TaskFile = None,
    row: TaskRow = None,
    idle: Annotated[float, typer.Option(min=1, help="Seconds until an unused HTTP session is closed.")] = 600.0,
) -> None:
    """Offer environments and tools to MCP clients. Each session gets instances of its own."""
    from agentfly.cli.env_list import resolve_task
    from agentfly.environment import Environment, has_tasks
    from agentfly.integrations.mcp import MCPApp

    served = [resolve_target(name) for name in names]
    classes = [target for target in served if inspect.isclass(target)]
    first = next((env_class for env_class in classes if has_tasks(env_class)), classes[0] if classes else Environment)
    server = MCPApp(
        served,
        name=f"agentfly {' '.join(names)}"[:100],
        task=resolve_task(first, question, task, row),
        api_key=api_key or "",
        idle_seconds=idle,
    )
    asyncio.run(_serve_http(server, host, port, api_key or "") if http else _serve_stdio(server))


@app.command("tools")
def tools_command(
    target: Annotated[
        list[str], typer.Argument(metavar="URL | -- COMMAND…", help="Address of a server, or its command.")
    ],
) -> None:
    """List the tools of an MCP server, as a model sees them."""
    from agentfly.cli.console import make_console
    from agentfly.cli.env_list import tool_lines
    from agentfly.integrations.mcp import mcp_server
    from agentfly.tooling import Toolbox

    is_url = len(target) == 1 and "://" in target[0]
    server = mcp_server((), url=target[0], stateful=False) if is_url else mcp_server(target)
    make_console().print(tool_lines(Toolbox([server])), end="")


def resolve_target(name: str) -> Tool | type[Environment]:
    """The environment or tool of this name: an entry point, `module:name` or `path/to/file.py:name`."""
    from agentfly import plugins
    from agentfly import tools as general_tools
    from agentfly.cli.resolve import list_members, resolve_environment
    from agentfly.tooling import TOOLS

    source, _, member = name.rpartition(":") if ":" in name else (name, "", "")
    if ":" not in name and not source.endswith(".py"):
        tools = [*(plugin.name for plugin in plugins.list_plugins(plugins.TOOLS)), *general_tools.__all__]
        return TOOLS.find(name) if name in tools else resolve_environment(name)
    if not member:
        return resolve_environment(name)
    members = list_members(source)
    if member not in members:
        raise ConfigError(f"{source} has no environment or tool {member!r}; it has {', '.join(members) or 'none'}")
    return members[member]


async def _serve_stdio(server: MCPApp) -> None:
    loop = asyncio.get_running_loop()
    stopping: set[asyncio.Task[None]] = set()

    async def stop() -> None:
        try:
            await server.__aexit__(None, None, None)
        finally:
            os._exit(0)  # a thread waits for stdin, which cannot be interrupted

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, lambda: stopping.add(loop.create_task(stop())))
    async with server:
        await server.serve_stdio()


async def _serve_http(server: MCPApp, host: str, port: int, api_key: str) -> None:
    from agentfly.gateway.http_server import format_url, open_listener, require_key
    from agentfly.gateway.server import make_server
    from agentfly.integrations.mcp.server import PATH

    require_key(host, api_key)
    listener = open_listener(host, port)
    url = format_url(host, listener.getsockname()[1]) + PATH

    async with server, server.app() as asgi:
        ready = f"agentfly: {', '.join(server.toolbox.names)} at {url}"
        http = make_server(asgi, lambda: print(ready, flush=True))
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, setattr, http, "should_exit", True)
        await http.serve(sockets=[listener])
    print("agentfly: the server has stopped", flush=True)
