"""A real vLLM server started by `agentfly serve`, and agents on the vLLM backend and on the server."""

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed: make vllm")

import torch

from agentfly import models
from agentfly.agents import HFAgent
from agentfly.backends.client import ClientBackend
from agentfly.errors import BackendFault, ConfigError
from agentfly.types import FinishReason
from tests.backends.engine.tiny import greedy, make_request, score_completion
from tests.backends.vllm.small import VOCABULARY, command_line, descendants, model_of, save_model, until


def close(got: Any, expected: Any) -> None:
    torch.testing.assert_close(torch.tensor(got.logprobs), expected, atol=1e-4, rtol=0)


def prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(3, VOCABULARY) for _ in range(length)] for length in lengths]


def start_server(model: str, *flags: str) -> tuple[subprocess.Popen[str], str]:
    """`agentfly serve` on a free port, once it says that it serves."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [
        sys.executable,
        "-m",
        "agentfly.cli",
        "serve",
        model,
        "--backend",
        "vllm",
        "--port",
        port,
        "--dtype",
        "float32",
        *flags,
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if f"is served at http://127.0.0.1:{port}/v1" in line:
            assert 'backend="client"' in next(process.stdout)
            return process, f"http://127.0.0.1:{port}/v1"
    process.wait()
    raise AssertionError(f"it ended with {process.returncode}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> str:
    return save_model(model_of(), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(folder: str) -> Iterator[str]:
    """The address of a server that is ended by Ctrl-C, and then leaves no process."""
    process, url = start_server(folder, "--updatable", "--", "--kv-cache-memory-bytes", str(1 << 26))
    processes = descendants()
    assert len(processes) == 2
    yield url
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0
    assert process.stdout is not None
    process.stdout.close()
    assert not any("VLLM" in command_line(pid) for pid in processes)


@pytest.fixture
async def client(server: str, folder: str) -> AsyncIterator[ClientBackend]:
    backend = ClientBackend(folder, server, prompt_format="tokens")
    yield backend
    await backend.close()


async def test_tokens_and_logprobs_equal_transformers(client: ClientBackend) -> None:
    model, rows = model_of(), prompts([4, 33, 17], seed=2)
    for row, got in zip(
        rows,
        await asyncio.gather(*(client.generate(make_request(row, 12, temperature=0)) for row in rows)),
        strict=True,
    ):
        assert list(got.token_ids) == greedy(model, row, 12)
    request = make_request(rows[1], 12, seed=3, temperature=0.7)
    got = await client.generate(request)
    close(got, score_completion(model, request, got, 0.7))
    assert client.context_length == 512
    assert (await client.generate(request)).token_ids == got.token_ids


async def test_stop_token_is_part_of_the_turn(client: ClientBackend) -> None:
    row = prompts([12])[0]
    free = list((await client.generate(make_request(row, 40, seed=3))).token_ids)
    got = await client.generate(make_request(row, 40, seed=3, stop_ids=frozenset({free[5]})))
    assert (list(got.token_ids), got.finish) == (free[: free.index(free[5]) + 1], FinishReason.STOP)


async def test_cancelled_turn_is_aborted_on_the_server(client: ClientBackend, server: str) -> None:
    import httpx

    first_token = asyncio.Event()
    turn = asyncio.create_task(client.generate(make_request([5, 6], 500, on_tokens=lambda _: first_token.set())))
    await first_token.wait()
    turn.cancel()
    with pytest.raises(asyncio.CancelledError):
        await turn

    async def running() -> float:
        async with httpx.AsyncClient() as asking:
            metrics = (await asking.get(server.removesuffix("v1") + "metrics")).text
        (line,) = [
            metric_line for metric_line in metrics.splitlines() if metric_line.startswith("vllm:num_requests_running{")
        ]
        return float(line.split()[-1])

    async with asyncio.timeout(60):
        while await running():
            await asyncio.sleep(0.1)


async def test_update_waits_for_running_turns_and_discards_the_cache(client: ClientBackend) -> None:
    model, other = model_of(), model_of(seed=9)
    request, first_token = make_request(prompts([300])[0], 12, seed=1), asyncio.Event()
    await client.generate(request)
    running = asyncio.create_task(
        client.generate(make_request([5, 6], 200, seed=1, on_tokens=lambda _: first_token.set()))
    )
    await first_token.wait()
    update = asyncio.create_task(client.update_weights(other.named_parameters(), 1))
    await asyncio.sleep(0.02)
    waiting = asyncio.create_task(client.generate(request))
    await update
    first, got = await running, await waiting
    assert (set(first.weight_versions), set(got.weight_versions)) == ({0}, {1})
    close(first, score_completion(model, make_request([5, 6]), first))
    close(got, score_completion(other, request, got))
    with pytest.raises(ConfigError, match="the model has no weight 'nonsense'"):
        await client.update_weights([("nonsense", torch.zeros(1))], 2)
    await client.update_weights(model.named_parameters(), 2)
    assert set((await client.generate(request)).weight_versions) == {2}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere/at-all"], "no model 'nowhere/at-all'"),
        (["{folder}", "--dtype", "int3"], "dtype is one of"),
        (["{folder}", "--", "--port", "3"], "goes before the --"),
        (["{folder}", "--host", "192.0.2.1"], "is not available"),
    ],
)
def test_invalid_arguments_are_one_line_errors(arguments: list[str], words: str, folder: str) -> None:
    command = [
        sys.executable,
        "-m",
        "agentfly.cli",
        "serve",
        *(argument.format(folder=folder) for argument in arguments),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert ended.returncode == 2
    assert words in ended.stderr.splitlines()[-1]


# ── an agent ──


async def ask_questions(agent: HFAgent) -> None:
    """Ask questions that the tiny model calls its tool for."""
    from agentfly.models.lookup import draw

    drawn = random.Random(11)
    rows = [draw(drawn, held_out=True) for _ in range(12)]
    result = await agent.run(rows, max_turns=4, sampling={"temperature": 1.0, "max_tokens": 40}, seed=0)
    answers = [message for chain in result.trajectories for message in chain.messages if message.role == "tool"]
    assert len(answers) >= 6
    for chain in result.trajectories:
        assert not chain.failures
        assert chain.sampled_tokens > 0


@pytest.fixture(scope="module")
def tiny() -> Path:
    if models.find_fault(models.PREPARED["tiny"]):
        pytest.skip("the tiny model takes a minute to make: agentfly models prepare tiny")
    return Path(models.resolve("tiny"))


async def test_agent_calls_its_tool_on_the_vllm_backend(tiny: Path) -> None:
    from agentfly.environments.lookup import Lookup

    settings = {"dtype": "float32", "kv_memory": 1 << 27}
    agent = HFAgent("tiny", tools=[Lookup.lookup], backend="vllm", backend_config=settings)
    await ask_questions(agent)
    await agent.close()


async def test_agent_calls_its_tool_through_the_server_which_ends_with_its_parent(tiny: Path) -> None:
    from agentfly.environments.lookup import Lookup

    earlier_processes = descendants()
    process, url = start_server("tiny", "--", "--kv-cache-memory-bytes", str(1 << 27))
    processes = descendants() - earlier_processes
    assert len(processes) == 2
    settings = {"base_url": url, "prompt_format": "tokens"}
    agent = HFAgent("tiny", tools=[Lookup.lookup], backend="client", backend_config=settings)
    await ask_questions(agent)
    with pytest.raises(ConfigError, match="agentfly serve MODEL --updatable"):
        await agent.backend.update_weights([("model.norm.weight", torch.zeros(160))], 1)
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()
    await until(lambda: not any("VLLM" in command_line(pid) for pid in processes))
    with pytest.raises(BackendFault, match="cannot reach"):
        await agent.backend.generate(make_request([5, 6], 4))
    await agent.close()
