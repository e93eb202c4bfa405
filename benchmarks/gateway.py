"""CPU time that the gateway adds to a call, beside a direct call of the same backend, and beside LiteLLM's proxy.

python -m benchmarks.gateway             256 chains of 10 turns; conversations of 100 turns
python -m benchmarks.gateway --quick     a smoke run
python -m benchmarks.gateway --litellm .venv-litellm/bin/litellm     with `pip install 'litellm[proxy]'` there

The backend answers at once from a script, so what is measured is the gateway: parsing, matching, recording, rendering
and HTTP. The clients run in a process of their own and send raw bytes, so that their time is not counted. A direct call
runs the same chains with `HFAgent` in this process: template, parser and record without HTTP. LiteLLM's proxy forwards
the same requests to a server in this process, whose time is not counted either. Times are CPU times of the serving
process, taken in alternating rounds: other work on the machine changes them little. The cost of long conversations is
measured beside servers that only read, or read and decode, the same requests.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import multiprocessing
import os
import secrets
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from starlette.responses import JSONResponse

from agentfly import tool
from agentfly.agents import HFAgent
from agentfly.backends.http_body import parse_json
from agentfly.backends.scripted import ScriptedBackend
from agentfly.gateway import Gateway
from agentfly.gateway.http_server import open_listener, read_request
from agentfly.gateway.server import MAX_BYTES, READ_SECONDS, make_server
from agentfly.rollout import ChainLimits, ChainSettings

CALL = '<tool_call>\n{"name": "lookup", "arguments": {"who": "Fotem", "what": "friend"}}\n</tool_call>'
OBSERVATION = "The friend of Fotem is Gabex."
QUESTION = "What is the color of the friend of Fotem?"
CHAT = "/v1/chat/completions"
REPLY = {
    "choices": [
        {
            "message": {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "id": "call_0",
                        "type": "function",
                        "function": {"name": "lookup", "arguments": '{"who": "Fotem", "what": "friend"}'},
                    }
                ],
            }
        }
    ]
}
PROXY_KEY = f"sk-{secrets.token_hex(32)}"


@tool
async def lookup(who: str, what: str) -> str:
    """Look up one fact about a person."""
    return OBSERVATION


# ── clients, in a process of their own ──


async def read_answer(reader: asyncio.StreamReader) -> bytes:
    """The body of one HTTP response."""
    length = None
    while (line := await reader.readline()) not in (b"\r\n", b""):
        if line.lower().startswith(b"content-length:"):
            length = int(line.split(b":")[1])
    if length is not None:
        return await reader.readexactly(length)
    body = b""
    while size := int(await reader.readline(), 16):  # chunked
        body += (await reader.readexactly(size + 2))[:-2]
    await reader.readline()
    return body


def read_message(answer: bytes, stream: bool) -> dict[str, Any]:
    """The reply of a response, whole or streamed."""
    if not stream:
        message: dict[str, Any] = json.loads(answer)["choices"][0]["message"]
        return message
    calls = []
    for line in answer.split(b"\n\n"):
        if line.startswith(b"data: {"):
            calls += json.loads(line[6:])["choices"][0]["delta"].get("tool_calls", [])
    return {"role": "assistant", "content": None, "tool_calls": calls}


async def converse(port: int, key: str, turns: int, *, stream: bool, observation: str) -> None:
    """One chain: a request per turn over one connection, with the whole conversation in each."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    for _ in range(turns):
        request_body = {"model": "scripted", "messages": messages, "tools": [lookup.schema], "stream": stream}
        body = json.dumps(request_body).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {key}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        message = read_message(await read_answer(reader), stream)
        messages.append(message)
        ids = [call["id"] for call in message["tool_calls"]]
        messages += [{"role": "tool", "tool_call_id": call_id, "content": observation} for call_id in ids]
    writer.close()


def run_clients(port: int, keys: list[str], turns: int, stream: bool, observation: str) -> None:
    """The clients' process: all chains at once."""

    async def main() -> None:
        await asyncio.gather(*(converse(port, key, turns, stream=stream, observation=observation) for key in keys))

    asyncio.run(main())


async def run_in_process(
    port: int, keys: list[str], turns: int, *, stream: bool = False, observation: str = OBSERVATION
) -> None:
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=run_clients, args=(port, keys, turns, stream, observation))
    process.start()
    await asyncio.to_thread(process.join)
    assert process.exitcode == 0, "the clients failed"


# ── measurements ──


def make_agent(script: Any = CALL) -> HFAgent:
    return HFAgent("bytes", template="chatml", tools=[lookup], backend=ScriptedBackend(script, chunk=16))


async def measure_direct(chains: int, turns: int) -> float:
    """CPU milliseconds per call of the same chains in this process."""
    agent = make_agent()
    started = time.process_time()
    await agent.run([QUESTION] * chains, max_turns=turns)
    return 1000 * (time.process_time() - started) / (chains * turns)


async def measure_gateway(chains: int, turns: int, *, stream: bool) -> float:
    """CPU milliseconds per call through the gateway."""
    agent = make_agent()
    settings = ChainSettings(limits=ChainLimits(max_turns=turns))
    async with Gateway(agent.backend, agent.load_template, model="scripted") as gateway:
        keys = [(await gateway.open_session(settings))[0] for _ in range(chains)]
        started = time.process_time()
        await run_in_process(gateway.port, keys, turns, stream=stream)
        used = time.process_time() - started
        assert gateway.metrics()["continued"] == 1.0
    return 1000 * used / (chains * turns)


async def measure_growth(turns: int, rounds: int, observation: str) -> dict[str, tuple[float, float]]:
    """CPU milliseconds per turn in the first and in the last tenth of long conversations, the median of `rounds`.

    Beside the gateway: servers of the same kind that only read a body, and that read and decode it, and send the
    same reply. Their growth is the least that a client which sends its whole history can cause.
    """
    times: list[float] = []
    tenth = max(turns // 10, 1)
    measured: dict[str, list[tuple[float, float]]] = {}

    def script(turn: Any) -> str:
        times.append(time.process_time())  # from one turn to the next: everything that the server does for a turn
        return CALL

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        body = await read_request(receive, MAX_BYTES, READ_SECONDS)
        if decodes:
            parse_json(body)
        script(None)
        await JSONResponse(REPLY)(scope, receive, send)

    agent = make_agent(script)
    settings = ChainSettings(limits=ChainLimits(max_turns=turns))
    listener, ready = open_listener("127.0.0.1", 0), asyncio.Event()
    server = make_server(answer, ready.set)
    async with Gateway(agent.backend, agent.load_template, model="scripted") as gateway, asyncio.TaskGroup() as tasks:
        tasks.create_task(server.serve(sockets=[listener]))
        await ready.wait()
        for number, name in itertools.product(range(rounds + 1), ("gateway", "only reads", "reads and decodes")):
            times.clear()
            decodes = name == "reads and decodes"
            key, _ = await gateway.open_session(settings)
            port = gateway.port if name == "gateway" else listener.getsockname()[1]
            await run_in_process(port, [key], turns, observation=observation)
            await gateway.close_session(key)
            steps = [1000 * (end - start) for start, end in itertools.pairwise(times)]
            if number:  # the first round warms up
                ends = statistics.median(steps[:tenth]), statistics.median(steps[-tenth:])
                measured.setdefault(name, []).append(ends)
        server.should_exit = True
    return {
        name: (
            statistics.median(first for first, _ in measurements),
            statistics.median(last for _, last in measurements),
        )
        for name, measurements in measured.items()
    }


@contextlib.contextmanager
def litellm_proxy(program: str, upstream: str) -> Iterator[tuple[int, psutil.Process]]:
    """LiteLLM's proxy in front of a server."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    model = {"model": "openai/scripted", "api_base": upstream, "api_key": "any"}
    config = {"model_list": [{"model_name": "scripted", "litellm_params": model}]}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "config.json")
        path.write_text(json.dumps(config))
        command = [program, "--config", str(path), "--port", str(port), "--host", "127.0.0.1"]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment["LITELLM_MASTER_KEY"] = PROXY_KEY  # the proxy does not start without one
        with Path(folder, "log").open("w+") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
            try:
                while socket.socket().connect_ex(("127.0.0.1", port)) != 0:
                    if process.poll() is not None:
                        log.seek(0)
                        raise SystemExit(f"LiteLLM's proxy did not start: {log.read()[-2000:]}")
                    time.sleep(0.2)
                yield port, psutil.Process(process.pid)
            finally:
                process.terminate()
                process.wait()


def cpu_seconds(process: psutil.Process) -> float:
    """CPU seconds of a process and its children."""
    times = [member.cpu_times() for member in (process, *process.children(recursive=True))]
    return sum(member.user + member.system for member in times)


async def measure_litellm(process: psutil.Process, port: int, chains: int, turns: int, *, stream: bool) -> float:
    """CPU milliseconds per call of LiteLLM's proxy alone."""
    started = cpu_seconds(process)
    await run_in_process(port, [PROXY_KEY] * chains, turns, stream=stream)
    return 1000 * (cpu_seconds(process) - started) / (chains * turns)


async def main(quick: bool, litellm: str) -> None:
    chains, turns, rounds = (8, 3, 1) if quick else (256, 10, 3)
    agent = make_agent()
    upstream = Gateway(agent.backend, agent.load_template, model="scripted", api_key="", record=False)
    with contextlib.ExitStack() as stack:
        await upstream.start()
        proxy = stack.enter_context(litellm_proxy(litellm, upstream.base_url)) if litellm else None
        if proxy is not None:
            await run_in_process(proxy[0], [PROXY_KEY] * 8, 3)  # the first requests load modules
        used: dict[str, list[float]] = {}
        for _ in range(rounds):  # alternating, so that a change of the machine's load meets all
            for stream in (False, True):
                name = "streamed" if stream else "whole"
                used.setdefault(f"direct, {name}", []).append(await measure_direct(chains, turns))
                used.setdefault(f"gateway, {name}", []).append(await measure_gateway(chains, turns, stream=stream))
                if proxy is not None:
                    port, process = proxy
                    cost = await measure_litellm(process, port, chains, 2, stream=stream)
                    used.setdefault(f"LiteLLM's proxy, {name}", []).append(cost)
        await upstream.close()
    print(f"{chains} concurrent chains of {turns} turns (LiteLLM: of 2): CPU ms per call, {rounds} rounds")
    for name, costs in used.items():
        print(f"  {name:28} {statistics.median(costs):.2f} ({min(costs):.2f} to {max(costs):.2f})")
    for name in ("whole", "streamed"):
        added = [one - other for one, other in zip(used[f"gateway, {name}"], used[f"direct, {name}"], strict=True)]
        print(f"  the gateway adds, {name:10} {statistics.median(added):.2f}, at most {max(added):.2f}")
    turns = 10 if quick else 100
    for size in (len(OBSERVATION), 1000):
        print(f"conversations of {turns} turns, observations of {size} characters: CPU ms per turn")
        growth = await measure_growth(turns, 1 if quick else 15, OBSERVATION.ljust(size, "."))
        for name, (first, last) in growth.items():
            grown = f"{last - first:+.2f}, ratio {last / first:.2f}"
            print(f"  {name:28} {first:.2f} at the start, {last:.2f} at the end: {grown}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--litellm", default="", help="the program `litellm` of an environment with litellm[proxy]")
    options = parser.parse_args()
    asyncio.run(main(options.quick, options.litellm))
