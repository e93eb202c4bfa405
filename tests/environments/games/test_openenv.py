"""OpenEnv: with openenv-core's own server where it is installed, and with a fake of its protocol."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentfly.environments.games.openenv_env import OpenEnvEnvironment
from agentfly.errors import ConfigError, EnvironmentFault
from agentfly.rewards import game_score
from agentfly.types import Task
from tests.environments.games.playing import answers, reset_env
from tests.fakes import call

pytest.importorskip("websockets", reason="websockets is in the extra 'openenv', which is not installed")


@pytest.fixture(params=["genuine", "stand-in"])
def server(request: pytest.FixtureRequest) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    if request.param == "genuine" and importlib.util.find_spec("openenv") is None:
        pytest.skip("openenv-core is not installed; the stand-in is tested")
    file = Path(__file__).with_name("openenv_server.py")
    process = subprocess.Popen([sys.executable, str(file), request.param], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        port = process.stdout.readline().strip()
        assert port, "the server did not start"
        yield f"http://127.0.0.1:{port}", process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def adding(number: object) -> str:
    return call("act", action=json.dumps({"number": number}))


async def test_sessions_of_a_server(server: tuple[str, subprocess.Popen[str]]) -> None:
    address, process = server
    row = {"question": "Make it show 10.", "address": address, "reset": {"seed": 3}}

    strange = [adding(500), adding("many"), call("act", action="three"), call("act", action="9" * 1_000_000)]
    observations, chain = await answers(
        OpenEnvEnvironment, row, adding(4), *strange, call("look"), adding(3), reward=game_score
    )
    assert (chain.reward, chain.score.metrics["won"]) == (1.0, 1.0)
    assert observations[0] == '{"text": "It shows 7."}'
    assert observations[1] == "Error: that is too much"
    assert "number" in observations[2]
    assert "JSON object" in observations[3]
    assert "at most 100000 characters" in observations[4]
    assert observations[5:] == ['{"text": "It shows 7."}', '{"text": "It shows 10."}']

    one, other = await reset_env(OpenEnvEnvironment, row), await reset_env(OpenEnvEnvironment, row)
    await one.act('{"number": 5}')
    assert other.view == '{"text": "It shows 3."}'
    await other.check()
    await one.reset(Task.of(row))
    assert (one.view, one.moves, one.score) == ('{"text": "It shows 3."}', 0, 0.0)

    class Counting(OpenEnvEnvironment):
        field, shows = "number", "text"

    worded = await reset_env(Counting, row)
    assert worded.view == "It shows 3."
    assert "number" in (await worded.act("many"))["observation"]
    await worded.close()

    process.kill()
    process.wait()
    with pytest.raises(EnvironmentFault, match=rf"OpenEnv server at {address.replace('http', 'ws')}/ws is gone"):
        await one.act('{"number": 1}')
    with pytest.raises(EnvironmentFault, match="is gone"):
        await other.check()
    with pytest.raises(EnvironmentFault, match="no OpenEnv server answers at"):
        await one.reset(Task.of(row))
    for env in (one, other):
        await env.close()


async def test_invalid_address_is_rejected() -> None:
    with pytest.raises(ConfigError, match="http://127"):
        await reset_env(OpenEnvEnvironment, {"question": "?", "address": "somewhere"})
    with pytest.raises(ConfigError, match="'reset'"):
        await reset_env(OpenEnvEnvironment, {"question": "?", "reset": 7})


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param("[" * 500_000, id="deep"),
        "<html>",
        "[]",
        '{"type": "observation", "data": 5}',
        '{"type": "observation", "data": {"observation": {}, "reward": "many"}}',
        '{"type": "observation", "data": {"observation": {}, "reward": NaN}}',
        '{"type": "observation", "data": {"observation": {}, "done": "perhaps"}}',
        '{"type": "error", "data": {"message": [1]}}',
        '{"type": "error", "data": {"errors": [5]}}',
    ],
)
async def test_malformed_answer_is_a_fault_of_the_environment(answer: str) -> None:
    from websockets.asyncio.server import ServerConnection, serve

    replies = ['{"type": "observation", "data": {"observation": {}}}', '{"type": "state", "data": {"reward": "x"}}']

    async def session(socket: ServerConnection) -> None:
        for reply in (*replies, answer):
            await socket.recv()
            await socket.send(reply)

    async with serve(session, "127.0.0.1", 0) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        env = await reset_env(OpenEnvEnvironment, {"question": "?", "address": f"http://127.0.0.1:{port}"})
        await env.check()
        with pytest.raises(EnvironmentFault, match="sent a malformed response"):
            await env.act('{"number": 1}')
