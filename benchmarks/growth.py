"""How much the memory of a process grows with the number of finished chains.

Each workload runs in a fresh process, in runs of 100 chains whose results are dropped. A chain is four turns: a tool,
an action in an environment, the tool again, an answer. Question, arguments and answer differ from chain to chain. Free
heap pages are returned to the system before the first chain, so that memory left over from loading hides no growth.

    python -m benchmarks.growth [--quick] [WORKLOAD ...]
"""

import argparse
import asyncio
import ctypes
import gc
import json
import socket
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from multiprocessing import get_context
from random import Random
from typing import Any

from agentfly import Environment, Pool, reward, tool
from agentfly.agents import HFAgent
from agentfly.backends.scripted import ScriptedBackend, ScriptedTurn
from agentfly.environments import CodeInterpreter
from agentfly.rollout import RunResult
from benchmarks.memory import MIB, resident
from benchmarks.sides.serve import TOKENIZER
from benchmarks.table import print_table

CHAINS_PER_RUN = 100
"""Chains of one run."""
WORKLOADS = {
    "default": "`await agent.run`, scripted backend, Qwen2.5 tokenizer, async tools, environment in this process",
    "threads": "the same with plain functions as tools, action and reward",
    "run_sync": "the same as `default`, one `agent.run_sync` per chain: each has its own event loop",
    "bytes": "`default` with a tokenizer that does not split text into words",
    "client": "`default` with the client backend and a server on loopback",
    "process": "`default` with the environment in four worker processes",
    "sandbox": "Python in a sandbox session, a new one for every chain",
}
CHAINS = {"sandbox": (250, 500, 1_000)}
"""Numbers of chains after which memory is read, if not those of `main`: a new session takes about 20 ms."""


class Notes(Environment):
    """Stores one text."""

    async def reset(self, task: Any) -> None:
        self.text = ""

    @tool
    async def note(self, text: str) -> str:
        """Write a text down."""
        self.text = text
        return f"noted: {text}"


class BlockingNotes(Environment):
    """The same with a plain function."""

    @tool
    def note(self, text: str) -> str:
        """Write a text down."""
        return f"noted: {text}"


class ProcessNotes(Notes):
    """The same in worker processes."""

    pool = Pool(runtime="process", max_instances=4)


class Python(CodeInterpreter):
    """A session for each chain."""

    pool = Pool(recycle="replace", min_warm=2, max_instances=4)  # type: ignore[arg-type]


@tool
async def reverse(text: str) -> str:
    """Reverse a text."""
    return text[::-1]


@tool(name="reverse")
def reverse_blocking(text: str) -> str:
    """Reverse a text."""
    return text[::-1]


@reward
async def done(prediction: str) -> float:
    return float(prediction.startswith("done"))


@reward
def done_blocking(prediction: str) -> float:
    return float(prediction.startswith("done"))


_random = Random(0)


def text_of(words: int) -> str:
    """Random words, almost never repeated."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    return " ".join("".join(_random.choices(letters, k=_random.randint(3, 9))) for _ in range(words))


def arguments_of(turn: int, python: bool) -> tuple[str, dict[str, Any]] | None:
    """Name and arguments of the call in a turn; None if the chain answers."""
    if turn == 3:
        return None
    if python:
        return "run_python", {"code": f"text = {text_of(10)!r}\nprint(len(text))"}
    return ("note" if turn == 1 else "reverse"), {"text": text_of(10)}


def script(turn: ScriptedTurn) -> str:
    call = arguments_of(turn.turn, python=False)
    return f"done {text_of(5)}" if call is None else format_call(*call)


def python_script(turn: ScriptedTurn) -> str:
    call = arguments_of(turn.turn, python=True)
    return f"done {text_of(5)}" if call is None else format_call(*call)


def format_call(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def serve(listener: socket.socket) -> None:
    """Serve chat completions with the replies of the script."""
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    async def answer(request: Request) -> JSONResponse:
        messages = (await request.json())["messages"]
        turn = sum(message["role"] == "assistant" for message in messages)
        call = arguments_of(turn, python=False)
        message: dict[str, Any] = {"role": "assistant", "content": f"done {text_of(5)}"}
        if call is not None:
            function = {"name": call[0], "arguments": json.dumps(call[1])}
            message["tool_calls"] = [{"id": f"call{turn}", "type": "function", "function": function}]
            message["content"] = ""
        finish = "stop" if call is None else "tool_calls"
        return JSONResponse({"choices": [{"index": 0, "message": message, "finish_reason": finish}]})

    app = Starlette(routes=[Route("/v1/chat/completions", answer, methods=["POST"])])
    uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off")).run(sockets=[listener])


@contextmanager
def server() -> Iterator[str]:
    """Yield the address of a server in another process."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        process = get_context("fork").Process(target=serve, args=(listener,), daemon=True)
        process.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        finally:
            process.terminate()
            process.join()


def agent_of(workload: str, url: str = "") -> HFAgent:
    if workload == "client":
        settings = {"base_url": url, "retries": 8}
        return HFAgent("served", tools=[reverse, Notes], reward=done, backend="client", backend_config=settings)
    if workload == "sandbox":
        tools, backend = [Python], ScriptedBackend(python_script)
        return HFAgent(str(TOKENIZER), tools=tools, reward=done, template="qwen2.5", backend=backend)
    if workload == "threads":
        acting: list[Any] = [reverse_blocking, BlockingNotes]
    else:
        acting = [reverse, ProcessNotes if workload == "process" else Notes]
    return HFAgent(
        "bytes" if workload == "bytes" else str(TOKENIZER),
        tools=acting,
        reward=done_blocking if workload == "threads" else done,
        template="chatml" if workload == "bytes" else "qwen2.5",
        backend=ScriptedBackend(script),
    )


def check(result: RunResult) -> None:
    """Raise if a chain failed: it would not have done the same work."""
    failed = [chain for chain in result if chain.failures or chain.reward != 1.0]
    assert not failed, f"{len(failed)} chains failed, one with {failed[0].failures}"


def rss_after(workload: str, counts: tuple[int, ...]) -> list[float]:
    """Resident MiB of this process after each of these numbers of chains."""
    with server() if workload == "client" else nullcontext("") as url:
        agent = agent_of(workload, url)
        ctypes.CDLL(None).malloc_trim(0)
        if workload == "run_sync":
            return [_rss_after_gc() for _ in _run_sync(agent, counts)]
        return asyncio.run(_run_async(agent, counts))


def _run_sync(agent: HFAgent, counts: tuple[int, ...]) -> Iterator[int]:
    for before, count in zip((0, *counts), counts, strict=False):
        for _ in range(count - before):
            check(agent.run_sync(text_of(10), max_turns=5))
        yield count


async def _run_async(agent: HFAgent, counts: tuple[int, ...]) -> list[float]:
    rss = []
    for before, count in zip((0, *counts), counts, strict=False):
        for at in range(before, count, CHAINS_PER_RUN):
            questions = [text_of(10) for _ in range(min(CHAINS_PER_RUN, count - at))]
            check(await agent.run([{"question": question} for question in questions], max_turns=5))
        agent.trajectories = ()
        rss.append(_rss_after_gc())
    await agent.close()
    return rss


def _rss_after_gc() -> float:
    gc.collect()
    return resident()


def measure(workload: str, counts: tuple[int, ...]) -> list[float]:
    """Run `rss_after` in a new process."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(rss_after, workload, counts).result()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="How much memory grows with the number of finished chains.")
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=f"of {', '.join(WORKLOADS)}; default: all")
    parser.add_argument("--quick", action="store_true", help="a smoke run; the figures are not meaningful")
    options = parser.parse_args(arguments)
    if unknown := set(options.workloads) - set(WORKLOADS):
        parser.error(f"no workload {', '.join(sorted(unknown))}; there are {', '.join(WORKLOADS)}")

    rows = []
    for workload in options.workloads or WORKLOADS:
        counts = (20, 40, 80) if options.quick else CHAINS.get(workload, (2_000, 4_000, 8_000))
        rss = measure(workload, counts)
        grown = (rss[-1] - rss[0]) * MIB / (counts[-1] - counts[0]) / 1000
        cells = [f"{mib:.1f} ({count:,})" for mib, count in zip(rss, counts, strict=True)]
        rows.append([workload, *cells, f"{grown:.2f}", WORKLOADS[workload]])
    print_table(
        "RSS in MiB (after this number of chains)",
        ["workload", "first", "second", "third", "KB per chain, first to third", "workload in detail"],
        rows,
    )


if __name__ == "__main__":
    main()
