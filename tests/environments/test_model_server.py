"""A model server as a resource, against a real server on loopback."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from agentfly import reward
from agentfly.agents import HFAgent
from agentfly.environments import ModelServer
from agentfly.errors import BackendFault, ConfigError, EnvironmentFault
from agentfly.resources import ResourceManager
from agentfly.types import Message, Task
from tests.backends.openai_server import OpenAIServer, chat, refuses, says

TASK = Task.of("How good is it?")
HURRY = {"Retry-After": "0"}


@dataclass
class Mark:
    points: int
    why: str


@pytest.fixture
def server(openai_server: OpenAIServer) -> OpenAIServer:
    openai_server.answers("/models", says({"data": [{"id": "tiny"}]}))
    openai_server.answers("/chat/completions", says(chat({"content": "7"})))
    return openai_server


@pytest.fixture
def judge(server: OpenAIServer) -> ModelServer:
    """An instance that is not started."""
    return type("Judge", (ModelServer,), {"base_url": server.url})()


async def test_question_and_conversation_are_answered(judge: ModelServer, server: OpenAIServer) -> None:
    await judge.start()
    assert await judge.chat("How good is it?") == "7"
    assert await judge.chat([{"role": "system", "content": "Be fair."}, Message("user", "Well?")], max_tokens=5) == "7"
    first, second = server.bodies("/chat/completions")
    assert (first["model"], first["temperature"]) == ("tiny", 0.0)
    assert first["messages"] == [{"role": "user", "content": "How good is it?"}]
    assert [message["role"] for message in second["messages"]] == ["system", "user"]
    assert second["max_tokens"] == 5
    await judge.close()
    assert server.left_alone()


async def test_all_leases_share_one_instance(judge: ModelServer, server: OpenAIServer) -> None:
    manager, kind = ResourceManager(), type(judge)
    async with manager.leases(TASK, [kind]) as one, manager.leases(TASK, [kind]) as other:
        assert await one.get(kind) is await other.get(kind)
    await manager.close()
    assert len([request for request in server.seen if request.path == "/models"]) == 1


async def test_concurrent_requests_are_limited(judge: ModelServer, server: OpenAIServer) -> None:
    under_way, most_together, together = 0, 0, asyncio.Event()

    async def slow(request: Request) -> Response:
        nonlocal under_way, most_together
        under_way += 1
        most_together = max(most_together, under_way)
        if under_way == 3:
            together.set()
        await together.wait()
        await asyncio.sleep(0.02)  # a fourth request would come now
        under_way -= 1
        return JSONResponse(chat({"content": "7"}))

    server.answers("/chat/completions", slow)
    type(judge).max_concurrent = 3
    await judge.start()
    assert await asyncio.gather(*(judge.chat("?") for _ in range(12))) == ["7"] * 12
    assert most_together == 3
    await judge.close()


async def test_schema_is_sent_and_answer_has_its_type(judge: ModelServer, server: OpenAIServer) -> None:
    server.answers("/chat/completions", says(chat({"content": '{"points": 7, "why": "short"}'})))
    await judge.start()
    assert await judge.chat("How good?", schema=Mark) == Mark(7, "short")
    form = server.bodies("/chat/completions")[0]["response_format"]
    assert form["type"] == "json_schema"
    assert set(form["json_schema"]["schema"]["properties"]) == {"points", "why"}
    await judge.close()


async def test_invalid_answer_is_requested_once_more(judge: ModelServer, server: OpenAIServer) -> None:
    fitting, unfitting = chat({"content": '{"points": 7, "why": ""}'}), chat({"content": "Seven!"})
    server.answers("/chat/completions", says(unfitting), says(fitting))
    await judge.start()
    assert (await judge.chat("How good?", schema=Mark)).points == 7
    asked_again = server.bodies("/chat/completions")[1]["messages"]
    assert [message["role"] for message in asked_again] == ["user", "assistant", "user"]
    assert "Invalid JSON" in asked_again[2]["content"]
    server.answers("/chat/completions", says(unfitting))
    with pytest.raises(BackendFault, match="asked twice and gave no fitting JSON"):
        await judge.chat("How good?", schema=Mark)
    await judge.close()


async def test_transient_errors_are_retried(judge: ModelServer, server: OpenAIServer) -> None:
    busy, down = refuses("slow down", 429, HURRY), refuses("restarting", 503, HURRY)
    server.answers("/chat/completions", busy, down, says(chat({"content": "7"})))
    await judge.start()
    assert await judge.chat("How good?") == "7"
    assert len(server.bodies("/chat/completions")) == 3
    await judge.close()


async def test_server_that_keeps_failing_is_an_environment_fault(judge: ModelServer, server: OpenAIServer) -> None:
    server.answers("/chat/completions", refuses("restarting", 503, HURRY))
    type(judge).retries = 1
    await judge.start()
    with pytest.raises(EnvironmentFault, match=r"503: restarting \(asked 2 times\)"):
        await judge.chat("How good?")
    await judge.close()


async def test_rejected_request_is_no_environment_fault(judge: ModelServer, server: OpenAIServer) -> None:
    await judge.start()
    for message in ("maximum context length is 5", "no such field"):
        server.answers("/chat/completions", refuses(message))
        with pytest.raises(BackendFault, match=message):
            await judge.chat("How good?")
    await judge.close()


async def test_check_notices_a_missing_server_or_model(judge: ModelServer, server: OpenAIServer) -> None:
    await judge.start()
    server.answers("/models", refuses("going down", 503, HURRY))
    with pytest.raises(EnvironmentFault, match="going down"):
        await judge.check()
    server.answers("/models", says({"data": [{"id": "other"}]}))
    with pytest.raises(ConfigError, match="does not serve 'tiny'; it serves other"):
        await judge.check()
    await judge.close()


async def test_unreachable_server_error_names_its_address() -> None:
    with socket.socket() as taken:  # bound and not listening: connections are refused, and the port stays taken
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
        unreachable = type("Unreachable", (ModelServer,), {"base_url": url})()
        with pytest.raises(EnvironmentFault, match=url):
            await unreachable.start()
        await unreachable.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "large"}, "does not serve 'large'; it serves tiny"),
        ({"api_key_variable": "NO_SUCH_KEY"}, "from NO_SUCH_KEY, which is not set"),
        ({"max_concurrent": 0}, "max_concurrent must be a whole number of at least 1, not 0"),
        ({"base_url": "localhost:8000"}, "must start with http"),
    ],
)
async def test_invalid_settings_fail_at_start(judge: ModelServer, settings: dict[str, object], message: str) -> None:
    kind = type("Wrong", (type(judge),), settings)
    manager = ResourceManager()
    async with manager.leases(TASK, [kind]) as leases:
        with pytest.raises(EnvironmentFault, match=message):
            await leases.get(kind)
    await manager.close()


async def test_several_models_need_a_name(judge: ModelServer, server: OpenAIServer) -> None:
    server.answers("/models", says({"data": [{"id": "tiny"}, {"id": "large"}]}))
    with pytest.raises(ConfigError, match="serves tiny, large; say which in Judge"):
        await judge.start()
    await judge.close()


async def test_api_key_of_the_variable_is_sent(
    judge: ModelServer, server: OpenAIServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    type(judge).api_key_variable = "JUDGE_KEY"
    await judge.start()
    assert server.seen[0].headers["authorization"] == "Bearer secret"
    await judge.close()


async def test_unknown_sampling_field_is_rejected(judge: ModelServer) -> None:
    await judge.start()
    with pytest.raises(ConfigError, match=r"takes temperature, .* and schema, not temprature"):
        await judge.chat("How good?", temprature=1)
    await judge.close()


async def test_reward_uses_the_judge(judge: ModelServer, server: OpenAIServer) -> None:
    kind = type(judge)

    @reward
    async def rating(prediction: str, judge: kind) -> float:  # type: ignore[valid-type]
        return int(await judge.chat(f"Points from 0 to 10 for {prediction!r}?")) / 10

    agent = HFAgent(reward=rating, template="chatml", backend="scripted", backend_config={"script": ["A poem."]})
    result = await agent.run("Write a poem.", num_chains=3)
    assert result.rewards == [0.7, 0.7, 0.7]
    assert "A poem." in server.bodies("/chat/completions")[0]["messages"][0]["content"]
    await agent.close()


async def test_malformed_answer_is_a_fault_of_the_environment(judge: ModelServer, server: OpenAIServer) -> None:
    type(judge).retries = 0
    server.answers("/chat/completions", says(chat({"content": 3})))
    await judge.start()
    with pytest.raises(EnvironmentFault, match=r"malformed: choices.0.message.content"):
        await judge.chat("How good?")
    server.answers("/models", says({"data": [{"id": 5}]}))
    with pytest.raises(EnvironmentFault, match=r"malformed: data.0.id"):
        await judge.check()
    await judge.close()
