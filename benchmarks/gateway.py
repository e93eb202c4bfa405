"""CPU time that the gateway adds to a call, beside a direct call of the same backend, and beside LiteLLM's proxy.

python -m benchmarks.gateway             256 chains of 10 turns; a conversation of 100 turns
python -m benchmarks.gateway --quick     a smoke run
python -m benchmarks.gateway --litellm .venv-litellm/bin/litellm

The backend answers at once from a script, so what is measured is the gateway: parsing, matching, recording, rendering
and HTTP. The clients run in a process of their own and send raw bytes, so that their time is not counted. A direct call
runs the same chains with `HFAgent` in this process: template, parser and record without HTTP. Times are CPU times of
the serving process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from agentfly import tool
from agentfly.agents import HFAgent
from agentfly.backends.scripted import ScriptedBackend
from agentfly.gateway import Gateway
from agentfly.rollout import ChainLimits, ChainSettings

CALL = '<tool_call>\n{"name": "lookup", "arguments": {"who": "Fotem", "what": "friend"}}\n</tool_call>'
OBSERVATION = "The friend of Fotem is Gabex."
QUESTION = "What is the color of the friend of Fotem?"


@tool
async def lookup(who: str, what: str) -> str:
    """Look up one fact about a person."""
    return OBSERVATION


def script(turn: Any) -> str:
    return CALL


async def read_answer(reader: asyncio.StreamReader) -> bytes:
    """The body of one HTTP response."""
    length = 0
    while (line := await reader.readline()) not in (b"\r\n", b""):
        if line.lower().startswith(b"content-length:"):
            length = int(line.split(b":")[1])
    return await reader.readexactly(length)


async def converse(port: int, key: str, turns: int, path: str, times: list[float] | None = None) -> None:
    """One chain: a request per turn over one connection, with the whole conversation in each."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    for _ in range(turns):
        body = json.dumps({"model": "scripted", "messages": messages, "tools": [lookup.schema]}).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {key}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        begun = time.perf_counter()
        writer.write(head.encode() + body)
        message = json.loads(await read_answer(reader))["choices"][0]["message"]
        if times is not None:
            times.append(time.perf_counter() - begun)
        messages.append(message)
        ids = [call["id"] for call in message["tool_calls"]]
        messages += [{"role": "tool", "tool_call_id": call_id, "content": OBSERVATION} for call_id in ids]
    writer.close()


def run_clients(port: int, keys: list[str], turns: int, path: str) -> None:
    """The clients' process: all chains at once."""

    async def main() -> None:
        await asyncio.gather(*(converse(port, key, turns, path) for key in keys))

    asyncio.run(main())


async def run_in_process(*arguments: Any) -> None:
    process = multiprocessing.get_context("spawn").Process(target=run_clients, args=arguments)
    process.start()
    await asyncio.to_thread(process.join)
    assert process.exitcode == 0, "the clients failed"


def make_agent() -> HFAgent:
    return HFAgent("bytes", template="chatml", tools=[lookup], backend=ScriptedBackend(script))


async def measure_direct(chains: int, turns: int) -> float:
    """CPU milliseconds per call of the same chains in this process."""
    agent = make_agent()
    begun = time.process_time()
    await agent.run([QUESTION] * chains, max_turns=turns)
    return 1000 * (time.process_time() - begun) / (chains * turns)


async def measure_gateway(chains: int, turns: int) -> float:
    """CPU milliseconds per call through the gateway."""
    agent = make_agent()
    settings = ChainSettings(limits=ChainLimits(max_turns=turns))
    async with Gateway(agent.backend, agent.load_template, model="scripted") as gateway:
        keys = [(await gateway.open_session(settings))[0] for _ in range(chains)]
        begun = time.process_time()
        await run_in_process(gateway.port, keys, turns, "/v1/chat/completions")
        used = time.process_time() - begun
        assert gateway.metrics()["continued"] == 1.0
    return 1000 * used / (chains * turns)


async def measure_growth(turns: int) -> tuple[float, float]:
    """CPU milliseconds per call in the first and in the last tenth of a long conversation."""
    agent = make_agent()
    settings = ChainSettings(limits=ChainLimits(max_turns=turns))
    async with Gateway(agent.backend, agent.load_template, model="scripted") as gateway:
        key, _ = await gateway.open_session(settings)
        times: list[float] = []
        await converse(gateway.port, key, turns, "/v1/chat/completions", times)
    tenth = max(turns // 10, 1)
    return 1000 * statistics.median(times[1 : tenth + 1]), 1000 * statistics.median(times[-tenth:])


@contextmanager
def litellm_proxy(program: str, upstream: str) -> Iterator[tuple[int, psutil.Process]]:
    """LiteLLM's proxy in front of a server."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = {
        "model_list": [
            {
                "model_name": "scripted",
                "litellm_params": {"model": "openai/scripted", "api_base": upstream, "api_key": "any"},
            }
        ]
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "config.json")
        path.write_text(json.dumps(config))
        command = [program, "--config", str(path), "--port", str(port)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ})
        try:
            for _ in range(600):
                with socket.socket() as connection:
                    if connection.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.2)
            yield port, psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait()


async def measure_litellm(program: str, chains: int, turns: int) -> float:
    """CPU milliseconds per call of LiteLLM's proxy alone."""
    agent = make_agent()
    async with Gateway(agent.backend, agent.load_template, model="scripted", api_key="", record=False) as gateway:
        with litellm_proxy(program, gateway.base_url) as (port, process):
            await run_in_process(port, ["any"], 1, "/v1/chat/completions")
            before = process.cpu_times()
            await run_in_process(port, ["any"] * chains, turns, "/v1/chat/completions")
            after = process.cpu_times()
    return 1000 * (after.user + after.system - before.user - before.system) / (chains * turns)


async def main(quick: bool, litellm: str) -> None:
    chains, turns, rounds = (8, 3, 1) if quick else (256, 10, 3)
    direct, through = [], []
    for _ in range(rounds):  # alternating, so that a change of the machine's load meets both
        direct.append(await measure_direct(chains, turns))
        through.append(await measure_gateway(chains, turns))
    added = [one - other for one, other in zip(through, direct, strict=True)]
    print(f"gateway: {chains} concurrent chains of {turns} turns, CPU per call, best of {rounds}")
    print(f"  direct call        {min(direct):.2f} ms")
    print(f"  through the gateway {min(through):.2f} ms, {min(added):.2f} ms more")
    if litellm:
        print(f"  LiteLLM's proxy adds {await measure_litellm(litellm, chains, turns):.2f} ms, without recording")
    else:
        print("  LiteLLM's proxy: give its program with --litellm")
    first, last = await measure_growth(10 if quick else 100)
    print(f"  conversation of {10 if quick else 100} turns: {first:.2f} ms at its start, {last:.2f} ms at its end")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--litellm", default="", help="the program `litellm` of an environment with litellm[proxy]")
    given = parser.parse_args()
    asyncio.run(main(given.quick, given.litellm))
