"""The embedded engine behind the gateway, with the genuine client: streams, cancellation, and `agentfly serve`."""

import asyncio
import os
import signal
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentfly.agents import HFAgent
from agentfly.cli.serve import find_checkpoint
from agentfly.errors import ConfigError
from agentfly.gateway import Gateway
from agentfly.models.lookup import TOOL_SCHEMA
from tests.commands import fork, run_main
from tests.gateway.conversations import SETTINGS

openai = pytest.importorskip("openai", reason="needs openai: pip install 'agentfly-rl[agents]'")
QUESTION: Any = {"role": "user", "content": "What is the color of the friend of Fotem?"}


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    agent = HFAgent("tiny")
    async with Gateway(agent.backend, agent.load_template, model="tiny", api_key="", record=False) as gateway:
        yield gateway
    await agent.close()


async def stream(client: Any, **fields: Any) -> str:
    """The text and calls of a streamed reply."""
    text = ""
    reply = await client.chat.completions.create(
        model="tiny", messages=[QUESTION], tools=[TOOL_SCHEMA], stream=True, **fields
    )
    async for chunk in reply:
        delta = chunk.choices[0].delta
        text += delta.content or ""
        text += "".join(call.function.arguments for call in delta.tool_calls or ())
    return text


async def check_streaming_clients(gateway: Gateway, count: int) -> None:
    async with openai.AsyncOpenAI(base_url=gateway.base_url, api_key="any", max_retries=0, timeout=300) as client:
        fields = {"temperature": 0.0, "max_tokens": 24}
        first = await stream(client, **fields)
        assert first
        assert await asyncio.gather(*(stream(client, **fields) for _ in range(count))) == [first] * count


async def test_streaming_clients_are_served_together(gateway: Gateway) -> None:
    await check_streaming_clients(gateway, 20)


@pytest.mark.slow_smoke
@pytest.mark.gateway_full
@pytest.mark.timeout(600)
async def test_two_hundred_streaming_clients_are_served(gateway: Gateway) -> None:
    await check_streaming_clients(gateway, 200)


async def test_a_recorded_chain_has_the_engines_log_probabilities() -> None:
    agent = HFAgent("tiny")
    async with Gateway(agent.backend, agent.load_template, model="tiny") as gateway:
        key, session = await gateway.open_session(SETTINGS)
        async with openai.AsyncOpenAI(base_url=gateway.base_url, api_key=key, max_retries=0, timeout=300) as client:
            reply = await client.chat.completions.create(
                model="tiny", messages=[QUESTION], tools=[TOOL_SCHEMA], logprobs=True, max_tokens=24
            )
        assert session.recorder is not None
        (segment,) = session.recorder.segments
        logprobs = [each.logprob for each in reply.choices[0].logprobs.content]
        assert logprobs == pytest.approx(segment.logprobs[segment.mask].tolist(), abs=1e-6)
        assert segment.weight_versions[segment.mask].tolist() == [0] * len(logprobs)
    await agent.close()


def test_serve_runs_until_it_is_interrupted(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    files = [tmp_path / each for each in ("stdin", "stdout", "stderr")]
    files[0].write_text("")
    with fork(run_main, ["serve", "tiny", "--port", port], files, tmp_path, None) as process:
        while not (files[1].exists() and "is served at" in files[1].read_text()):
            assert process.is_alive(), files[2].read_text()
            time.sleep(0.05)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}/v1", timeout=120) as client:
            assert client.get("/models").json()["data"][0]["id"] == "tiny"
            body = {"messages": [QUESTION], "max_tokens": 4}
            assert client.post("/chat/completions", json=body).is_success
        assert process.pid is not None
        os.kill(process.pid, signal.SIGINT)
        process.join(120)
        assert process.exitcode == 0, files[2].read_text()


def test_a_run_folder_stands_for_its_newest_checkpoint(tmp_path: Path) -> None:
    assert find_checkpoint("tiny") == "tiny"
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ConfigError, match="no checkpoint yet"):
        find_checkpoint(str(tmp_path))
    for step in (2, 10):
        (tmp_path / "checkpoints" / f"step-{step}" / "model").mkdir(parents=True)
    assert find_checkpoint(str(tmp_path)).endswith("step-10/model")
