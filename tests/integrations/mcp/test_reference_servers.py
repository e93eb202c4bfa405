"""The reference servers of the Model Context Protocol, unmodified, as tools of an agent."""

import asyncio
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import psutil
import pytest

pytest.importorskip("mcp", reason="the extra mcp is not installed")

from agentfly import Task
from agentfly.backends.scripted import ScriptedTurn
from agentfly.errors import ConfigError
from agentfly.integrations.mcp import MCPServer, mcp_server
from agentfly.resources import ResourceManager
from agentfly.tooling import Context, Toolbox, ToolResult
from agentfly.trajectory import CallStatus, FailureKind, StopReason
from agentfly.types import ToolCall
from tests.fakes import byte_agent
from tests.fakes import call as call_text
from tests.integrations.mcp.fetch import find_server

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]


def program(name: str) -> str:
    command = find_server(name)
    if command is None:
        pytest.skip(f"mcp-server-{name} is not installed: python tests/integrations/mcp/fetch.py")
    return str(command)


async def run_calls(server: type[MCPServer], *calls: ToolCall, task: object = "x") -> list[ToolResult]:
    """The results of calls in one chain."""
    toolbox, manager, results = Toolbox([server]), ResourceManager(), list[ToolResult]()
    parsed_task = Task.of(task)
    try:
        async with manager.leases(parsed_task) as leases:
            environment = await leases.get(server)
            for requested in calls:
                tool = toolbox.find(requested)
                assert not isinstance(tool, ToolResult)
                result = await tool.run(
                    requested.arguments, context=Context(parsed_task), environments={server: environment}
                )
                results.append(result)
    finally:
        await manager.close()
    return results


async def test_time():
    server = mcp_server([program("time")], stateful=False)
    assert Toolbox([server]).names == ["get_current_time", "convert_time"]
    times = {"source_timezone": "Europe/Berlin", "target_timezone": "Asia/Tokyo", "time": "12:00"}
    converted, unknown, missing = await run_calls(
        server,
        ToolCall("convert_time", times),
        ToolCall("get_current_time", {"timezone": "Mars/Phobos"}),
        ToolCall("get_current_time"),
    )
    assert '"time_difference"' in str(converted.observation)
    assert converted.info["structured"]["target"]["timezone"] == "Asia/Tokyo"
    assert unknown.status is missing.status is CallStatus.INVALID
    assert "Mars/Phobos" in str(unknown.observation)


async def test_git():
    class Git(MCPServer):
        command = [program("git")]  # noqa: RUF012

        async def prepare(self, task: Task) -> None:
            commands = "git init -q -b main && git config user.email a@b.c && git config user.name a"
            shell = await asyncio.create_subprocess_shell(commands, cwd=self.folder)
            assert await shell.wait() == 0
            (self.folder / "file.txt").write_text(task.question)

    here = {"repo_path": "."}
    status, _, committed, log = await run_calls(
        Git,
        ToolCall("git_status", here),
        ToolCall("git_add", {**here, "files": ["file.txt"]}),
        ToolCall("git_commit", {**here, "message": "Add a file"}),
        ToolCall("git_log", here),
        task="hello",
    )
    assert "file.txt" in str(status.observation)
    assert "committed" in str(committed.observation)
    assert "Add a file" in str(log.observation)


@pytest.fixture
def page() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            exists = self.path == "/page"
            body = b"<html><body><h1>Tides</h1><p>The moon moves the sea.</p></body></html>"
            self.send_response(200 if exists else 404)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(body if exists else b"none")

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


async def test_fetch(page):
    server = mcp_server([program("fetch"), "--ignore-robots-txt", "--allow-private-ips"], stateful=False)
    fetched, missing = await run_calls(
        server, ToolCall("fetch", {"url": f"{page}/page"}), ToolCall("fetch", {"url": f"{page}/none"})
    )
    assert "The moon moves the sea." in str(fetched.observation)
    assert missing.status is CallStatus.INVALID
    assert "404" in str(missing.observation)


async def test_everything():
    server = mcp_server([program("everything")], name="Everything")
    assert "simulate-research-query" not in Toolbox([server]).names  # runs only as a task of the protocol
    duration = {"duration": 1, "steps": 2}
    echo, total, structured, image, worked, resource, invalid = await run_calls(
        server,
        ToolCall("echo", {"message": "hello"}),
        ToolCall("get-sum", {"a": "2", "b": 3}),
        ToolCall("get-structured-content", {"location": "Chicago"}),
        ToolCall("get-tiny-image"),
        ToolCall("trigger-long-running-operation", duration),
        ToolCall("get-resource-reference", {"resourceType": "Text", "resourceId": 1}),
        ToolCall("get-sum", {"a": "many", "b": 3}),
    )
    assert echo.observation == "Echo: hello"
    assert "is 5" in str(total.observation)
    assert set(structured.info["structured"]) == {"temperature", "conditions", "humidity"}
    # The image of this server has a wrong checksum, and is not decoded.
    assert "[image: an image that cannot be shown:" in str(image.observation)
    assert worked.info["progress"] == ["1/2", "2/2"]
    assert "Resource 1" in str(resource.observation)
    assert invalid.status is CallStatus.INVALID


async def test_everything_over_streamable_http():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [program("everything"), "streamableHttp"]
    environment = {**os.environ, "PORT": str(port)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:  # noqa: ASYNC220
        try:
            assert process.stderr is not None
            while "listening" not in process.stderr.readline():
                assert process.poll() is None
            server = mcp_server(url=f"http://127.0.0.1:{port}/mcp", name="Everything", timeout=20.0)
            echo, worked = await run_calls(
                server,
                ToolCall("echo", {"message": "hello"}),
                ToolCall("trigger-long-running-operation", {"duration": 1, "steps": 2}),
            )
            assert echo.observation == "Echo: hello"
            assert worked.info["progress"] == ["1/2", "2/2"]
        finally:
            process.kill()
    with pytest.raises(ConfigError, match="does not start"):
        mcp_server(url=f"http://127.0.0.1:{port}/mcp").load_tools()


async def test_filesystem_is_confined_to_the_folder_of_its_chain():
    class Files(MCPServer):
        command = [program("filesystem"), "{folder}"]  # noqa: RUF012

        async def prepare(self, task: Task) -> None:
            (self.folder / "a.txt").write_text(task.question)

    read, outside, written, listed = await run_calls(
        Files,
        ToolCall("read_text_file", {"path": "a.txt"}),
        ToolCall("read_text_file", {"path": "/etc/passwd"}),
        ToolCall("write_file", {"path": "b.txt", "content": "new"}),
        ToolCall("list_directory", {"path": "."}),
        task="hello",
    )
    assert read.observation == "hello"
    assert outside.status is CallStatus.INVALID
    assert "outside allowed directories" in str(outside.observation)
    assert written.status is CallStatus.OK
    assert "b.txt" in str(listed.observation)


def remember(turn: ScriptedTurn) -> str:
    """Each chain stores an entity named after itself, reads the graph, and answers."""
    entity = {"name": f"entity-{turn.chain}", "entityType": "chain", "observations": [f"chain {turn.chain}"]}
    new_observation = {"entityName": entity["name"], "contents": ["seen twice"]}
    replies = [
        call_text("create_entities", entities=[entity]),
        call_text("add_observations", observations=[new_observation]),
        call_text("read_graph"),
        "done",
    ]
    return replies[turn.turn]


class _Memory(MCPServer):
    env = {"MEMORY_FILE_PATH": "{folder}/memory.jsonl"}  # noqa: RUF012


async def test_memory_keeps_concurrent_chains_apart_and_leaves_no_process():
    class Memory(_Memory):
        command = [program("memory")]  # noqa: RUF012

    agent = byte_agent(remember, tools=[Memory])
    result = await agent.run([{"question": "a"}, {"question": "b"}], max_turns=5, num_chains=3)
    assert len(result.trajectories) == 6
    for trajectory in result.trajectories:
        assert trajectory.stop is StopReason.ANSWER
        graph = [m.text for m in trajectory.messages if m.role == "tool"][-1]
        assert graph.count('"entityType"') == 1
        assert "seen twice" in graph
    below = psutil.Process().children(recursive=True)
    servers = [process for process in below if any("mcp-server-memory" in word for word in process.cmdline())]
    await agent.close()
    _, alive = psutil.wait_procs(servers, timeout=30)
    assert not alive


async def test_memory_killed_in_the_middle_of_a_chain_is_retried():
    victims: list[int] = []

    class Memory(_Memory):
        command = [program("memory")]  # noqa: RUF012

        async def call_tool(self, name, arguments):
            if name == "read_graph" and not victims:
                assert self.pid is not None
                victims.extend(child.pid for child in psutil.Process(self.pid).children(recursive=True))
                for pid in victims:
                    os.kill(pid, signal.SIGKILL)
            return await super().call_tool(name, arguments)

    agent = byte_agent(remember, tools=[Memory])
    (trajectory,) = await agent.run("a", max_turns=5)
    assert victims
    assert trajectory.stop is StopReason.ANSWER
    assert [failure.kind for failure in trajectory.failures] == [FailureKind.ENVIRONMENT]
    assert [m.text for m in trajectory.messages if m.role == "tool"][-1].count('"entityType"') == 1
    await agent.close()
    await asyncio.sleep(0)
    assert not any(psutil.pid_exists(pid) for pid in victims)
