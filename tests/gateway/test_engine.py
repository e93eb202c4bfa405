"""The embedded engine behind the gateway, with the genuine client: streams, cancellation, and `agentfly serve`."""

import asyncio
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentfly.agents import HFAgent
from agentfly.backends.base import Request
from agentfly.cli.serve import find_checkpoint
from agentfly.errors import ConfigError
from agentfly.gateway import Gateway
from agentfly.models.lookup import TOOL_SCHEMA
from agentfly.rollout import ChainLimits, ChainSettings
from agentfly.types import Sampling
from tests.commands import fork, run_command, run_main
from tests.gateway.conversations import SETTINGS

QUESTION: Any = {"role": "user", "content": "What is the color of the friend of Fotem?"}


@pytest.fixture
async def gateway(small_model: Path) -> AsyncIterator[Gateway]:
    agent = HFAgent(str(small_model))
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


async def check_streaming_clients(openai: Any, url: str, count: int) -> None:
    async with openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0, timeout=300) as client:
        fields = {"temperature": 0.0, "max_tokens": 24}
        first = await stream(client, **fields)
        assert first
        assert await asyncio.gather(*(stream(client, **fields) for _ in range(count))) == [first] * count


async def test_equal_parallel_requests_of_a_chain_with_a_seed_have_different_replies(gateway: Gateway) -> None:
    settings = ChainSettings(sampling=Sampling(max_tokens=24, temperature=2.0), limits=ChainLimits(max_turns=8), seed=1)
    key, _ = await gateway.open_session(settings)
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=gateway.base_url, headers=headers, timeout=60) as client:
        body = {"messages": [QUESTION]}
        answers = await asyncio.gather(*(client.post("/chat/completions", json=body) for _ in range(8)))
    assert len({answer.json()["choices"][0]["message"]["content"] for answer in answers}) == 8


async def test_streaming_clients_are_served_together(gateway: Gateway, openai: Any) -> None:
    await check_streaming_clients(openai, gateway.base_url, 20)


async def test_a_stream_that_is_cancelled_frees_its_rows_of_the_engine(gateway: Gateway, openai: Any) -> None:
    backend: Any = gateway.backend
    scheduler = backend._engine._scheduler
    async with openai.AsyncOpenAI(base_url=gateway.base_url, api_key="any", max_retries=0, timeout=300) as client:
        # The model does not end its turn at this temperature: the stream would go on up to the context length.
        fields = {"model": "tiny", "messages": [QUESTION], "temperature": 100.0, "stream": True}
        streams = [await client.chat.completions.create(**fields) for _ in range(3)]
        for opened in streams:
            await anext(aiter(opened))
            await opened.close()
        while scheduler.running or scheduler.waiting:  # the test's time limit is the limit
            await asyncio.sleep(0.01)
        assert await stream(client, temperature=0.0, max_tokens=24)


@pytest.mark.parametrize(
    ("field", "value"), [("stop_token_ids", [2**70]), ("stop_token_ids", [1] * 100), ("temperature", 1e300)]
)
async def test_extreme_values_do_not_end_the_engine(gateway: Gateway, field: str, value: Any) -> None:
    body = {"prompt": "Hi", "max_tokens": 2}
    async with httpx.AsyncClient(base_url=gateway.base_url, timeout=300) as client:
        refused = await client.post("/completions", json={**body, field: value})
        assert refused.status_code == 400, refused.text
        assert (await client.post("/completions", json=body)).is_success
    request = Request([1, 2], Sampling(max_tokens=1), stop_ids=frozenset([2**70]))
    with pytest.raises(ConfigError, match="stop_ids"):
        await gateway.backend.generate(request)


async def test_a_recorded_chain_has_the_engines_log_probabilities(small_model: Path, openai: Any) -> None:
    agent = HFAgent(str(small_model))
    async with Gateway(agent.backend, agent.load_template, model="tiny") as gateway:
        key, session = await gateway.open_session(SETTINGS)
        async with openai.AsyncOpenAI(base_url=gateway.base_url, api_key=key, max_retries=0, timeout=300) as client:
            reply = await client.chat.completions.create(
                model="tiny", messages=[QUESTION], tools=[TOOL_SCHEMA], logprobs=True, max_tokens=24
            )
        assert session.recorder is not None
        (segment,) = session.recorder.segments
        logprobs = [entry.logprob for entry in reply.choices[0].logprobs.content]
        assert logprobs == pytest.approx(segment.logprobs[segment.mask].tolist(), abs=1e-6)
        assert segment.weight_versions[segment.mask].tolist() == [0] * len(logprobs)
    await agent.close()


@contextmanager
def serve_command(tmp_path: Path, *arguments: str) -> Iterator[str]:
    """Run `agentfly serve` or `agentfly gateway`, and end it with Ctrl-C. Yields the address for clients."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    files = [tmp_path / name for name in ("stdin", "stdout", "stderr")]
    files[0].write_text("")
    with fork(run_main, [*arguments, "--port", port], files, tmp_path, None) as process:
        while not (files[1].exists() and "is served at" in files[1].read_text()):
            assert process.is_alive(), files[2].read_text()
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}/v1"
        assert process.pid is not None
        os.kill(process.pid, signal.SIGINT)
        process.join(120)
        assert process.exitcode == 0, files[2].read_text()


def test_serve_runs_until_it_is_interrupted(tmp_path: Path, small_model: Path) -> None:
    with serve_command(tmp_path, "serve", str(small_model)) as url, httpx.Client(base_url=url, timeout=120) as client:
        assert client.get("/models").json()["data"][0]["id"] == str(small_model)
        assert client.post("/chat/completions", json={"messages": [QUESTION], "max_tokens": 4}).is_success


def test_serve_needs_a_key_for_other_machines(small_model: Path) -> None:
    done = run_command("serve", str(small_model), "--host", "0.0.0.0")
    assert (done.returncode != 0, "give an api_key" in done.stderr) == (True, True)


@pytest.mark.full
@pytest.mark.timeout(600)
async def test_serve_holds_under_two_hundred_streaming_clients(tmp_path: Path, small_model: Path, openai: Any) -> None:
    with serve_command(tmp_path, "serve", str(small_model)) as url:
        await check_streaming_clients(openai, url, 200)


@pytest.mark.slow_smoke
def test_the_model_of_a_run_is_served(tmp_path: Path) -> None:
    run = tmp_path / "run"
    fields = ["steps=1", "tasks_per_step=2", "num_chains=2", "evaluation.every=none"]
    done = run_command("train", "lookup", "--run", run, *fields, "checkpoint.every=1")
    assert done.returncode == 0, done.stderr
    with serve_command(tmp_path, "serve", str(run)) as url, httpx.Client(base_url=url, timeout=120) as client:
        body = {"messages": [QUESTION], "max_tokens": 8, "temperature": 0, "logprobs": True, "return_token_ids": True}
        choice = client.post("/chat/completions", json=body).json()["choices"][0]
    trained = HFAgent(find_checkpoint(str(run)))
    sampled = asyncio.run(run_once(trained))
    assert choice["token_ids"] == sampled.token_ids
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert logprobs == pytest.approx(sampled.logprobs, abs=1e-4)


async def run_once(agent: HFAgent) -> Any:
    """Sample the same turn without a server."""
    template = agent.load_template(tools=())
    request = Request(template.start([QUESTION]), Sampling(temperature=0.0, max_tokens=8), stop_ids=template.stop_ids)
    completion = await agent.backend.generate(request)
    await agent.close()
    return completion


def test_a_run_folder_stands_for_its_newest_checkpoint(tmp_path: Path) -> None:
    assert find_checkpoint("tiny") == "tiny"
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ConfigError, match="no checkpoint yet"):
        find_checkpoint(str(tmp_path))
    for step in (2, 10):
        (tmp_path / "checkpoints" / f"step-{step}" / "model").mkdir(parents=True)
    assert find_checkpoint(str(tmp_path)).endswith("step-10/model")
