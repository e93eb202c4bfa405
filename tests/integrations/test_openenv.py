"""An environment served by the OpenEnv protocol: with OpenEnv's own clients where installed, and message by message."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from agentfly import Environment, Task, reward, tool
from agentfly.environments.games.openenv_env import OpenEnvEnvironment
from agentfly.errors import ConfigError
from agentfly.integrations.openenv import OpenEnvServer
from tests.environments.games.playing import reset_env

websockets = pytest.importorskip("websockets", reason="websockets is in the extra 'openenv', which is not installed")
pytest.importorskip("uvicorn", reason="uvicorn is in the extra 'openenv', which is not installed")


class Counter(Environment):
    """A counter with a button."""

    live = 0

    @classmethod
    def draw_tasks(cls, split: str = "train", count: int = 100, *, seed: int = 0) -> list[dict[str, Any]]:
        return [
            {"id": f"{split}-{seed}-{n}", "question": f"Reach {seed + n}.", "target": seed + n} for n in range(count)
        ]

    async def start(self) -> None:
        type(self).live += 1

    async def reset(self, task: Task) -> None:
        self.shown = 0

    @tool
    async def press(self, times: int) -> str:
        """Press the button.

        Args:
            times: How often.
        """
        self.shown += times
        return f"It shows {self.shown}."

    @tool(ends_chain=True)
    async def stop(self) -> str:
        """Stop here."""
        return "Stopped."

    async def close(self) -> None:
        type(self).live -= 1


@reward
def reached(env: Counter, target: int, prediction: str) -> dict[str, Any]:
    return {"reward": float(env.shown == target), "answered": float(prediction == "done")}


@pytest.fixture
async def server() -> AsyncIterator[OpenEnvServer]:
    Counter.live = 0
    async with OpenEnvServer(Counter, reward=reached, max_sessions=3, max_turns=6) as running:
        yield running
    assert Counter.live == 0


@asynccontextmanager
async def connect(server: OpenEnvServer, **options: Any) -> AsyncIterator[Any]:
    """A function that sends a message and returns the response."""
    from websockets.asyncio.client import connect

    async with connect(f"ws{server.url.removeprefix('http')}/ws", **options) as socket:

        async def ask(kind: Any, data: Any = None, *, text: str | None = None) -> Any:
            message = {"type": kind} if data is None else {"type": kind, "data": data}
            await socket.send(json.dumps(message) if text is None else text)
            answer = json.loads(await socket.recv())
            return answer["data"] if answer["type"] != "error" else (answer["data"]["code"], answer["data"]["message"])

        yield ask


def press(times: Any) -> dict[str, Any]:
    return {"type": "call_tool", "tool_name": "press", "arguments": {"times": times}}


async def test_clients_of_openenv_drive_an_environment(server: OpenEnvServer) -> None:
    core = pytest.importorskip("openenv.core", reason="openenv is not installed: make openenv")
    from openenv.core.env_server.mcp_types import CallToolAction, ListToolsAction

    async with core.GenericEnvClient(base_url=server.url) as one, core.GenericEnvClient(base_url=server.url) as other:
        first = await one.reset(seed=7)
        assert (first.observation["prompt"], first.done) == ("Reach 7.", False)
        await other.reset(seed=3)
        stepped = await one.step(press(4))
        assert (stepped.observation["result"], stepped.reward, stepped.done) == ("It shows 4.", None, False)
        assert (await other.step(press(3))).observation["result"] == "It shows 3."
        assert (await one.state())["step_count"] == 1
        await one.step(press(3))
        ended = await one.step({"tool_name": "stop"})
        assert (ended.observation["result"], ended.reward, ended.done) == ("Stopped.", 1.0, True)
        ended = await other.step({"type": "answer", "answer": "done"})
        assert (ended.reward, ended.done) == (1.0, True)
        with pytest.raises(RuntimeError, match="there is no episode"):
            await other.step(press(1))
        assert (await other.reset(seed=4)).observation["prompt"] == "Reach 4."

        assert [tool["name"] for tool in (await other.step(ListToolsAction())).observation["tools"]] == [
            "press",
            "stop",
        ]
        result = await other.step(CallToolAction(tool_name="press", arguments={"times": 4}))
        assert result.observation["result"] == "It shows 4."


async def test_messages_of_an_episode(server: OpenEnvServer) -> None:
    async with connect(server) as ask:
        assert (await ask("step", press(1)))[0] == "EXECUTION_ERROR"
        tools = (await ask("step", {"type": "list_tools"}))["observation"]["tools"]
        assert tools[0]["input_schema"]["required"] == ["times"]
        began = await ask("reset", {"task": {"question": "Reach 2.", "target": 2}, "episode_id": "one"})
        assert (began["observation"]["prompt"], began["reward"], began["done"]) == ("Reach 2.", None, False)
        assert "'times'" in (await ask("step", press("many")))["observation"]["result"]
        assert "no tool 'fly'" in (await ask("step", {"tool_name": "fly"}))["observation"]["result"]
        assert (await ask("step", press(2)))["observation"] == {"tool_name": "press", "result": "It shows 2."}
        assert await ask("state") == {"episode_id": "one", "step_count": 3}
        ended = await ask("step", {"type": "answer", "answer": "done"})
        assert (ended["reward"], ended["done"]) == (1.0, True)
        assert ended["metadata"] == {"stop_reason": "answer", "metrics": {"answered": 1.0}}

        await ask("reset", {"seed": 9})
        last = [await ask("step", press(1)) for _ in range(6)][-1]
        assert (last["observation"]["result"], last["done"], last["reward"]) == ("It shows 6.", True, 0.0)
        assert last["metadata"]["stop_reason"] == "max_turns"


@pytest.mark.parametrize(
    ("kind", "data", "code", "words"),
    [
        ("step", {"type": "jump"}, "VALIDATION_ERROR", "call_tool"),
        ("step", {"arguments": {}}, "VALIDATION_ERROR", "tool_name"),
        ("step", [], "VALIDATION_ERROR", "Invalid step"),
        ("reset", {"level": 3}, "VALIDATION_ERROR", "level"),
        ("reset", {"task": {"answer": 3}}, "EXECUTION_ERROR", "question"),
        ("dance", {}, "UNKNOWN_TYPE", "there are reset, step, state and close"),
        ("{", None, "INVALID_JSON", "Invalid JSON"),
    ],
)
async def test_wrong_messages_are_answered_and_the_session_goes_on(
    server: OpenEnvServer, kind: str, data: Any, code: str, words: str
) -> None:
    async with connect(server) as ask:
        await ask("reset", {"seed": 1})
        error = await ask(kind, data, text=kind if data is None else None)
        assert error[0] == code
        assert words in error[1]
        assert (await ask("reset", {"seed": 1}))["observation"]["prompt"] == "Reach 1."


async def test_sessions_are_limited_and_released(server: OpenEnvServer) -> None:
    from websockets.asyncio.client import connect as open_socket
    from websockets.exceptions import InvalidStatus

    address = f"ws{server.url.removeprefix('http')}/ws"
    sockets = [await open_socket(address) for _ in range(3)]
    for socket in sockets:
        await socket.send('{"type": "reset", "data": {"seed": 1}}')
        await socket.recv()
    async with open_socket(address) as refused:
        assert json.loads(await refused.recv())["data"]["code"] == "CAPACITY_REACHED"
    for socket in sockets:
        await socket.close()  # in the middle of an episode
    async with asyncio.timeout(60):
        while server.sessions or server.manager.metrics()["Counter/leased"]:
            await asyncio.sleep(0.01)
    with pytest.raises(InvalidStatus, match="403"):
        await open_socket(address, origin="http://example.com")
    with pytest.raises(ConfigError, match=r"is not available.*choose another port"):
        await OpenEnvServer(Counter, port=server.port).start()


async def test_our_own_client_plays_in_a_served_environment(server: OpenEnvServer) -> None:
    row = {"question": "Reach 5.", "address": server.url, "reset": {"seed": 5}}
    remote = await reset_env(OpenEnvEnvironment, row)
    try:
        assert json.loads(remote.view)["prompt"] == "Reach 5."
        await remote.act(json.dumps(press(5)))
        result = await remote.act('{"tool_name": "stop"}')
        assert (result["ends_chain"], result["won"], result["score"]) == (True, True, 1.0)
    finally:
        await remote.close()


async def test_an_address_for_other_machines_needs_a_key() -> None:
    from websockets.exceptions import InvalidStatus

    with pytest.raises(ConfigError, match="give an api_key"):
        OpenEnvServer(Counter, host="0.0.0.0")
    async with OpenEnvServer(Counter, reward=reached, api_key="secret") as server:
        for key in ("", "Bearer other", "secret"):
            with pytest.raises(InvalidStatus, match="403"):
                async with connect(server, additional_headers={"authorization": key}):
                    pass
        async with connect(server, additional_headers={"authorization": "Bearer secret"}) as ask:
            assert (await ask("reset", {"seed": 1}))["observation"]["prompt"] == "Reach 1."


def test_an_environment_is_served_from_the_command_line() -> None:
    command = [sys.executable, "-m", "agentfly", "env", "serve", "Lookup", "--reward", "qa_em", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            url = process.stdout.readline().split("served at ")[1].partition(";")[0]
            assert httpx.get(f"{url}/health").json() == {"status": "healthy"}
            assert httpx.get(f"{url}/metadata").json()["name"] == "Lookup"
            assert "tool_name" in json.dumps(httpx.get(f"{url}/schema").json()["action"])
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
        finally:
            process.kill()
