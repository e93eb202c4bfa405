"""AgentFly environments and tools offered to MCP clients: the official client, and our own."""

import asyncio
import gzip
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

pytest.importorskip("mcp", reason="the extra mcp is not installed")

import httpx2
import mcp_types
from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client

from agentfly import Environment, Task, tool
from agentfly.environment import Pool
from agentfly.errors import ConfigError, EnvironmentFault
from agentfly.gateway.http_server import require_key
from agentfly.gateway.server import make_server
from agentfly.integrations.mcp import MCPApp, mcp_server
from agentfly.integrations.mcp.server import MAX_BYTES, PATH
from agentfly.resources import ResourceManager
from agentfly.tooling import Context, Toolbox, ToolResult
from agentfly.types import Image, ToolCall
from tests.commands import run_command

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg=="
LIVE = set[int]()
"""Ids of the counters that are started and not closed."""


class Counter(Environment):
    pool = Pool(idle_seconds=0)

    async def start(self) -> None:
        LIVE.add(id(self))

    async def reset(self, task: Task) -> None:
        self.shown = int(task.columns.get("start", 0))

    async def close(self) -> None:
        LIVE.discard(id(self))

    @tool
    async def press(self, times: int) -> str:
        """Press the button.

        Args:
            times: How often.
        """
        print("a line that must not reach the client")
        self.shown += times
        return f"The counter shows {self.shown}."

    @tool
    async def look(self) -> Any:
        """Look at it."""
        return {"observation": "a pixel", "image": Image(f"data:image/png;base64,{PIXEL}"), "secret": "42"}

    @tool(ends_chain=True)
    async def stop(self) -> str:
        """Stop."""
        return "stopped"

    @tool
    async def crash(self) -> str:
        """Crash."""
        raise ValueError("out of order")

    @tool(timeout=0.1)
    async def hang(self) -> str:
        """Hang."""
        await asyncio.sleep(60)
        return ""


@tool
def shout(text: str) -> str:
    """Shout."""
    return text.upper()


def text_of(result: mcp_types.CallToolResult) -> str:
    return "".join(block.text for block in result.content if isinstance(block, mcp_types.TextContent))


@asynccontextmanager
async def serve(app: MCPApp) -> AsyncIterator[str]:
    listener = socket.create_server(("127.0.0.1", 0))
    ready = asyncio.Event()
    async with app, app.app() as asgi:
        server = make_server(asgi, ready.set)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        await ready.wait()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}{PATH}"
        finally:
            server.should_exit = True
            await serving
            listener.close()


async def test_official_client_over_http_has_an_instance_per_session():
    task = Task.of({"question": "Make it show 7.", "start": 2})
    app = MCPApp([Counter, shout], task=task)
    async with serve(app) as url, Client(url) as one, Client(url) as two:
        assert one.instructions == "Make it show 7."
        listed = {tool.name: tool for tool in (await one.list_tools()).tools}
        assert list(listed) == ["press", "look", "stop", "crash", "hang", "shout"]
        assert listed["press"].input_schema["properties"]["times"] == {"type": "integer", "description": "How often."}
        assert text_of(await one.call_tool("press", {"times": 1})) == "The counter shows 3."
        assert text_of(await two.call_tool("press", {"times": 10})) == "The counter shows 12."
        assert text_of(await one.call_tool("press", {"times": 1})) == "The counter shows 4."
        assert text_of(await one.call_tool("shout", {"text": "a"})) == "A"
        assert app.num_sessions == len(LIVE) == 2

        image = await one.call_tool("look", {})
        assert [block.type for block in image.content] == ["text", "image"]
        assert image.structured_content is None  # other values may contain the solution
        invalid = await one.call_tool("press", {"count": 1})
        assert invalid.is_error
        assert "'times' is missing" in text_of(invalid)
        unknown = await one.call_tool("push", {})
        assert unknown.is_error
        assert "Tools there are: press, look" in text_of(unknown)
        crashed = await one.call_tool("crash", {})
        assert "ValueError: out of order" in text_of(crashed)
        hung = await one.call_tool("hang", {})
        assert "Its state is lost; the next call starts a new one." in text_of(hung)
        assert text_of(await one.call_tool("press", {"times": 1})) == "The counter shows 3."
        await one.call_tool("stop", {})
        assert "open a new session" in text_of(await one.call_tool("press", {"times": 1}))
        assert text_of(await two.call_tool("press", {"times": 1})) == "The counter shows 13."
    assert not LIVE


async def test_session_that_ends_releases_its_instance():
    app = MCPApp([Counter])
    async with serve(app) as url:
        async with Client(url) as client:
            await client.call_tool("press", {"times": 1})
            assert app.num_sessions == 1
        async with asyncio.timeout(60):
            while app.num_sessions or LIVE:
                await asyncio.sleep(0.01)


async def test_client_that_disappears_loses_its_session():
    app = MCPApp([Counter], idle_seconds=3.0)  # longer than a busy machine takes between two requests
    async with serve(app) as url:
        http = httpx2.AsyncClient()
        transport = streamable_http_client(url, http_client=http, terminate_on_close=False)
        async with http, Client(transport) as client:
            await client.call_tool("press", {"times": 1})
        async with asyncio.timeout(60):
            while app.num_sessions or LIVE:
                await asyncio.sleep(0.01)


async def test_our_client_with_our_server():
    async with serve(MCPApp([Counter], task=Task.of({"question": "x", "start": 1}))) as url:
        server = mcp_server(url=url, name="Remote", include=["press", "look"])
        manager = ResourceManager()
        await asyncio.to_thread(server.load_tools)
        toolbox = Toolbox([server])

        async def play(times: int) -> list[Any]:
            async with manager.leases(Task.of("x")) as leases:
                environment = await leases.get(server)
                out = []
                for call in (
                    ToolCall("press", {"times": times}),
                    ToolCall("press", {"times": times}),
                    ToolCall("look"),
                ):
                    tool = toolbox.find(call)
                    assert not isinstance(tool, ToolResult)
                    context = Context(Task.of("x"))
                    result = await tool.run(call.arguments, context=context, environments={server: environment})
                    out.append(result.observation)
                return out

        one, two = await asyncio.gather(play(1), play(10))
        assert one[:2] == ["The counter shows 2.", "The counter shows 3."]
        assert two[:2] == ["The counter shows 11.", "The counter shows 21."]
        assert one[2][0] == "a pixel"
        assert isinstance(one[2][1], Image)
        assert await play(5) == ["The counter shows 6.", "The counter shows 11.", one[2]]  # a session of its own again
        await manager.close()


async def test_lost_http_server_is_an_environment_fault():
    server = None
    manager = ResourceManager()
    async with manager.leases(Task.of("x")) as leases:
        async with serve(MCPApp([Counter])) as url:
            server = mcp_server(url=url, name="Remote", include=["press"])
            await asyncio.to_thread(server.load_tools)
            environment = await leases.get(server)
            assert (await environment.call_tool("press", {"times": 1}))["observation"] == "The counter shows 1."
        with pytest.raises(EnvironmentFault, match="the MCP server Remote is lost"):
            await environment.call_tool("press", {"times": 1})
    await manager.close()


async def test_requests_without_the_key_and_of_web_pages_are_refused():
    message = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {}}
    async with serve(MCPApp([Counter], api_key="sécret")) as url, httpx.AsyncClient() as http:
        wrong_keys = [("x", ""), ("authorization", "Bearer x"), ("authorization", "sécret"), ("x-api-key", "é")]
        for name, key in [*wrong_keys, ("x-api-key", "secret")]:
            assert (await http.post(url, json=message, headers={name: key.encode()})).status_code == 401
        with_key = httpx2.AsyncClient(headers={"authorization": "Bearer sécret".encode()})
        async with with_key, Client(streamable_http_client(url, http_client=with_key)) as client:
            assert text_of(await client.call_tool("press", {"times": 1})) == "The counter shows 1."
    async with serve(MCPApp([Counter])) as url, httpx.AsyncClient() as http:
        refused = await http.post(url, json=message, headers={"origin": "https://evil.example"})
        assert refused.status_code == 403
        refused = await http.post(url, json=message, headers={"host": "evil.example"})
        assert refused.status_code == 403
        assert (await http.post(url, content=b"x" * (MAX_BYTES + 1))).status_code == 413
        assert (await http.get(url.replace(PATH, "/other"))).status_code == 404
        for body in (b"", b"[]", b"\xff", b'{"jsonrpc": 1}', b"[" * 100_000):
            answer = await http.post(url, content=body, headers={"content-type": "application/json"})
            assert 400 <= answer.status_code < 500
    with pytest.raises(ConfigError, match=r"'0\.0\.0\.0' is reachable from other machines: give an api_key"):
        require_key("0.0.0.0", "")


async def test_unknown_session_id_is_not_found():
    async with serve(MCPApp([Counter])) as url, httpx.AsyncClient() as http:
        message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "press", "arguments": {}}}
        accept = {"accept": "application/json, text/event-stream", "mcp-session-id": "0" * 32}
        assert (await http.post(url, json=message, headers=accept)).status_code == 404


def command(*names: str) -> list[str]:
    return [sys.executable, "-m", "agentfly", "mcp", "serve", *names]


def environment_variables() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


@pytest.mark.slow_smoke
async def test_serve_command_over_stdio():
    here = f"{Path(__file__)}:Counter"
    words = command(here, f"{Path(__file__)}:shout", "-q", "Press.")
    parameters = StdioServerParameters(command=words[0], args=words[1:], env=environment_variables())
    async with Client(parameters) as client:
        assert client.instructions == "Press."
        assert text_of(await client.call_tool("press", {"times": 2})) == "The counter shows 2."
        assert text_of(await client.call_tool("press", {"times": 2})) == "The counter shows 4."
        assert text_of(await client.call_tool("shout", {"text": "a"})) == "A"


def test_serve_command_over_http_stops_on_a_signal_and_leaves_no_process():
    words = [*command("calculate"), "--http", "--port", "0"]
    with subprocess.Popen(words, env=environment_variables(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("agentfly: calculate at http://127.0.0.1:")

        async def calculate() -> str:
            async with Client(line.split()[-1]) as client:
                return text_of(await client.call_tool("calculate", {"expression": "6*7"}))

        assert asyncio.run(calculate()) == "42"
        below = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert not psutil.wait_procs(below, timeout=30)[1]


@pytest.mark.slow_smoke
def test_serve_command_rejects_unknown_names_and_open_addresses():
    for words, problem in (
        (["no_such_thing"], "there is no environment 'no_such_thing'"),
        ([f"{Path(__file__)}:nothing"], "has no environment or tool 'nothing'; it has Counter, shout"),
        (["calculate", "--http", "--host", "0.0.0.0"], "give an api_key, or listen on 127.0.0.1"),
    ):
        done = run_command("mcp", "serve", *words)
        assert done.returncode != 0
        assert problem in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.slow_smoke
async def test_misbehaving_http_servers_are_observations_or_faults():
    """Answers that are too large, malformed or missing, of a server that could list its tools."""
    kind = ""

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        request = json.loads(message["body"] or b"{}")
        method = request.get("method")
        result: dict[str, Any] = {"tools": [{"name": "say", "inputSchema": {"type": "object"}}]}
        if method == "initialize":
            capabilities = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}}
            result = {**capabilities, "serverInfo": {"name": "odd", "version": "1"}}
        elif method == "tools/call":
            result = {"content": [{"type": "text", "text": "x" * (30_000_000 if "large" in kind else 1)}]}
        reply = json.dumps({"jsonrpc": "2.0", "id": request.get("id"), "result": result}).encode()
        status, media_type = 200 if "id" in request else 202, b"application/json"
        headers = [(b"mcp-session-id", b"a")]
        if method == "tools/call" and kind == "large event":
            reply, media_type = b"event: message\ndata: " + reply + b"\n\n", b"text/event-stream"
        elif method == "tools/call" and kind == "compressed":
            reply, headers = gzip.compress(reply), [*headers, (b"content-encoding", b"gzip")]
        elif method == "tools/call" and kind == "not json":
            reply = b"<html>"
        elif method == "tools/call" and kind == "unavailable":
            status = 503
        elif method == "tools/call" and kind == "silent":
            await asyncio.sleep(60)
        elif scope["method"] == "GET":
            status = 405
        headers = [*headers, (b"content-type", media_type)]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": reply})

    listener, ready = socket.create_server(("127.0.0.1", 0)), asyncio.Event()
    server = make_server(answer, ready.set)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    await ready.wait()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/mcp"
    outcomes: dict[str, str] = {}
    for kind in ("well-behaved", "large json", "large event", "compressed", "not json", "unavailable", "silent"):
        # A busy machine takes seconds for 30 MB; only the silent server is to run into the limit.
        odd = mcp_server(url=url, name="Odd", timeout=2.0 if kind == "silent" else 60.0)
        await asyncio.to_thread(odd.load_tools)
        manager = ResourceManager()
        async with manager.leases(Task.of("x")) as leases:
            environment = await leases.get(odd)
            try:
                returned = (
                    await Toolbox([odd])
                    .find(ToolCall("say"))
                    .run(  # type: ignore[union-attr]
                        {}, context=Context(Task.of("x")), environments={odd: environment}
                    )
                )
                outcomes[kind] = f"{returned.status.value}: {returned.observation}"
            except EnvironmentFault as fault:
                outcomes[kind] = f"fault: {fault}"
        await manager.close()
    server.should_exit = True
    await serving
    listener.close()
    assert outcomes["well-behaved"] == "ok: x"
    for kind in ("large json", "large event", "compressed", "not json"):
        assert outcomes[kind].startswith(("error: ", "fault: ")), outcomes
    assert "16,777,216 bytes" in outcomes["large json"]
    assert outcomes["unavailable"].startswith("fault: the MCP server Odd is lost")
    assert outcomes["silent"].startswith("fault: 'say' gave neither an answer nor progress for 2 s")
