"""Sandbox sessions compared with a new Python process per call, with a prototype without isolation, with ipykernel
if it is installed, and in containers with a container exec per call if there is a container engine; and the resets of
the environments that reset by a new session.

python -m benchmarks.sandbox [--held 500 | --quick] [--mechanism NAME] [--python PATH] [--image IMAGE]
"""

import argparse
import ast
import asyncio
import contextlib
import importlib.util
import io
import itertools
import json
import os
import random
import select
import socket
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from agentfly import environments
from agentfly.resources import ResourceManager
from agentfly.resources.runtimes.container import Container
from agentfly.sandbox import LocalSandbox, Sandbox, SandboxUnavailable, Session, open_sandbox
from agentfly.threads import call
from agentfly.types import Task
from benchmarks.environments import measure_rate
from benchmarks.table import print_table

CODE = "x = 1\nx + 1"
LOADED = "import numpy\n" + CODE
CONCURRENCY = (1, 16, 64)
RESET_BY_SESSION = ("MathWithPython", "ProgramSynthesis", "Shell")


def milliseconds(times: list[float]) -> str:
    ordered = sorted(1000 * seconds for seconds in times)
    return f"{statistics.median(ordered):.2f} / {ordered[int(len(ordered) * 0.99)]:.2f}"


def proportional_memory(root: int) -> float:
    """MB of all processes below `root`, shared pages counted once."""
    total = 0
    for process in (psutil.Process(root), *psutil.Process(root).children(recursive=True)):
        with contextlib.suppress(psutil.Error):  # it has ended, or belongs to another user
            total += process.memory_full_info().pss
    return total / 2**20


async def closed_loop(callers: list[Callable[[], Awaitable[object]]], calls: int) -> tuple[float, list[float]]:
    """Calls per second, and the time of each call, when every caller repeats its call as soon as it returns."""
    times: list[float] = []
    left = calls

    async def one(caller: Callable[[], Awaitable[object]]) -> None:
        nonlocal left
        while left > 0:
            left -= 1
            started = time.perf_counter()
            await caller()
            times.append(time.perf_counter() - started)

    started = time.perf_counter()
    await asyncio.gather(*(one(caller) for caller in callers))
    return len(times) / (time.perf_counter() - started), times


async def run_new_python(code: str) -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    await process.communicate()


async def measure_start(mechanism: str | None, python: str | None, opens: int) -> list[list[str]]:
    """Time until a session can be called: opened when it is needed, and forked ahead of need."""
    rows = []
    for ready in (0, 4):
        async with await open_sandbox(mechanism, reduced=True, python=python, ready_sessions=ready) as sandbox:
            times = []
            for _ in range(opens):
                started = time.perf_counter()
                session = await sandbox.open_session()
                times.append(time.perf_counter() - started)
                await session.run(CODE)
                await session.close()
            ordered = sorted(1000 * seconds for seconds in times)
            p95 = ordered[int(len(ordered) * 0.95)]
            rows.append([f"{ready} forked ahead", f"{statistics.median(ordered):.2f}", f"{p95:.2f}"])
    return rows


class CapturedOutput(io.TextIOBase):
    """Output of one cell, up to a limit."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.left = 1 << 16
        self.dropped = 0

    def write(self, text: str) -> int:
        self.parts.append(text[: self.left])
        self.dropped += max(len(text) - self.left, 0)
        self.left -= len(self.parts[-1])
        return len(text)


def answer_cells(channel: socket.socket) -> None:
    """Run cells that arrive as JSON lines, with their output captured: the loop of a prototype, without isolation."""
    namespace: dict[str, Any] = {}
    for line in channel.makefile("rb"):
        question = json.loads(line)
        output = CapturedOutput()
        streams = sys.stdout, sys.stderr
        sys.stdout = sys.stderr = output
        value = None
        ok = True
        try:
            tree = ast.parse(question["code"], "<cell>")
            last = ast.Expression(tree.body.pop().value) if isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(tree, "<cell>", "exec"), namespace)
            if last is not None:
                value = repr(eval(compile(last, "<cell>", "eval"), namespace))
        except BaseException:
            ok = False
            output.write(traceback.format_exc(limit=-5))
        finally:
            sys.stdout, sys.stderr = streams
        reply = {"id": question["id"], "ok": ok, "out": "".join(output.parts), "val": value, "dropped": output.dropped}
        channel.sendall(json.dumps(reply).encode() + b"\n")


def measure_prototype(many: int, calls: int) -> float:
    """Calls per second of the prototype: forked processes that answer over socket pairs, driven by one epoll loop."""
    channels, pids = {}, []
    for _ in range(many):
        host_socket, peer_socket = socket.socketpair()
        pids.append(os.fork())
        if pids[-1] == 0:
            for inherited in (host_socket, *channels.values()):
                inherited.close()
            answer_cells(peer_socket)
            os._exit(0)
        peer_socket.close()
        channels[host_socket.fileno()] = host_socket
    poller = select.epoll()
    for fd in channels:
        poller.register(fd, select.EPOLLIN)
    started, sent, done = time.perf_counter(), 0, 0
    waiting = list(channels)
    while done < calls:
        for fd in waiting:
            if sent < calls:
                sent += 1
                channels[fd].sendall(json.dumps({"id": sent, "code": CODE}).encode() + b"\n")
        waiting = [fd for fd, _ in poller.poll()]
        for fd in waiting:
            assert json.loads(channels[fd].recv(65536))["val"] == "2"
            done += 1
    rate = calls / (time.perf_counter() - started)
    for channel in channels.values():
        channel.close()
    for pid in pids:
        os.waitpid(pid, 0)
    return rate


async def measure_resets(seconds: float) -> list[list[str]]:
    """Resets per second of the environments that reset by a new session, without warm instances."""
    rows = []
    for name in RESET_BY_SESSION:
        env_class = getattr(environments, name)
        row = [name]
        for instances in (1, 16):
            pool = replace(env_class.pool, max_instances=instances, min_warm=0)
            manager = ResourceManager({env_class: pool})
            tasks = itertools.cycle([Task.of(row) for row in env_class.draw_tasks("train", 32)])
            await measure_rate(manager, env_class, tasks, instances, seconds=seconds / 4, steps=0)
            rate = await measure_rate(manager, env_class, tasks, instances, seconds=seconds, steps=0)
            row.append(f"{rate:.0f}")
            await manager.close()
        rows.append(row)
    return rows


async def open_and_close(sandbox: Sandbox, calls: int) -> list[list[str]]:
    async def open_and_run() -> None:
        session = await sandbox.open_session()
        await session.run(CODE)
        await session.close()

    rows = []
    for together in (1, 8):
        rate, times = await closed_loop([open_and_run] * together, calls)
        what = f"{sandbox.mechanism}: open, call, close; {together} at a time"
        rows.append([what, f"{rate:.1f}", milliseconds(times)])
    return rows


async def measure_opening(sandbox: LocalSandbox) -> list[list[str]]:
    rows = await open_and_close(sandbox, 150)
    for name, code in (("bare", CODE), ("with numpy", LOADED)):
        rate, times = await closed_loop([lambda code=code: run_new_python(code)] * 2, 30)
        rows.append([f"new Python process, {name}; 2 at a time", f"{rate:.0f}", milliseconds(times)])
    return rows


async def measure_calls(sandbox: LocalSandbox) -> list[list[str]]:
    rows = []
    for many in CONCURRENCY:
        sessions = await asyncio.gather(*(sandbox.open_session() for _ in range(many)))
        rate, times = await closed_loop([lambda s=s: s.run(CODE) for s in sessions], 1500 if many == 1 else 4000)
        new_rate, new_times = await closed_loop([lambda: run_new_python(CODE)] * many, max(30, 2 * many))
        await asyncio.gather(*(session.close() for session in sessions))
        prototype = measure_prototype(many, 4000)
        cells = [f"{rate:.0f}", milliseconds(times), f"{prototype:.0f}", f"{rate / prototype:.2f}"]
        rows.append([str(many), *cells, f"{new_rate:.0f}", milliseconds(new_times)])
    return rows


def measure_kernel() -> list[str]:
    """One ipykernel, called with its own blocking client."""
    from jupyter_client.manager import start_new_kernel

    started = time.perf_counter()
    manager, client = start_new_kernel(kernel_name="python3")
    ready = time.perf_counter() - started
    times = []
    for _ in range(100):
        started = time.perf_counter()
        client.execute_interactive(CODE, output_hook=lambda message: None)
        times.append(time.perf_counter() - started)
    memory = proportional_memory(manager.provisioner.process.pid)
    client.stop_channels()
    manager.shutdown_kernel(now=True)
    return ["1", f"{len(times) / sum(times):.0f}", milliseconds(times), f"start {1000 * ready:.0f} ms, {memory:.0f} MB"]


@contextlib.contextmanager
def engine(image: str | None) -> Iterator[str]:
    """Yield an image: the given one on the user's engine, or one with this Python on a temporary podman."""
    if image:
        yield image
        return
    from tests.resources.engine import IMAGE, NoEngine, Podman, load_images

    with tempfile.TemporaryDirectory() as folder:
        try:
            podman = Podman(Path(folder) / "engine")
            podman.start()
        except NoEngine as error:
            raise SandboxUnavailable(str(error)) from error
        before = os.environ.get("DOCKER_HOST")
        try:
            load_images(podman)
            os.environ["DOCKER_HOST"] = podman.url
            yield IMAGE
        finally:
            os.environ.pop("DOCKER_HOST") if before is None else os.environ.update(DOCKER_HOST=before)
            podman.remove()


async def measure_containers(image: str | None) -> None:
    """Compare one container per session with a new Python process in a running container per call."""
    import docker

    with engine(image) as built_image:
        async with await open_sandbox(Container(image=built_image)) as sandbox:
            opening = await open_and_close(sandbox, 16)
            print_table("New container, one call, close", ["what", "per second", "ms, median / 99 %"], opening)
            rows = []
            for many in (1, 8):
                sessions = await asyncio.gather(*(sandbox.open_session() for _ in range(many)))
                rate, times = await closed_loop([lambda s=s: s.run(CODE) for s in sessions], 1000)
                await asyncio.gather(*(session.close() for session in sessions))
                with exec_python(
                    docker.APIClient(version="auto", **docker.utils.kwargs_from_env()), built_image
                ) as run:
                    exec_rate, exec_times = await closed_loop([lambda run=run: call(run)] * many, 24)
                cells = milliseconds(times), f"{exec_rate:.1f}", milliseconds(exec_times)
                rows.append([str(many), f"{rate:.0f}", *cells])
    header = ["at once", "sessions: calls/s", "ms, median / 99 %", "exec per call: calls/s", "ms, median / 99 %"]
    print_table("Calls in containers", header, rows)


@contextlib.contextmanager
def exec_python(client: Any, image: str) -> Iterator[Callable[[], None]]:
    """Yield a function that runs a new Python process in a running container."""
    alone = client.create_host_config(network_mode="none")
    name = client.create_container(image, entrypoint=["sleep", "3600"], host_config=alone)["Id"]

    def run() -> None:
        client.exec_start(client.exec_create(name, ["python3", "-c", CODE])["Id"])

    try:
        client.start(name)
        yield run
    finally:
        client.remove_container(name, force=True)
        client.close()


async def measure_holding(sandbox: LocalSandbox, held: int) -> list[list[str]]:
    before, available = proportional_memory(os.getpid()), psutil.virtual_memory().available
    started = time.perf_counter()
    sessions: list[Session] = []
    for _ in range(0, held, 20):
        sessions += await asyncio.gather(*(sandbox.open_session() for _ in range(20)))
    filled = time.perf_counter() - started
    await asyncio.sleep(0.5)
    mib_per_session = (available - psutil.virtual_memory().available) / 2**20 / len(sessions)
    shared = (proportional_memory(os.getpid()) - before) / len(sessions)
    _, times = await closed_loop([lambda: random.choice(sessions).run(CODE)], 300)
    started = time.perf_counter()
    await asyncio.gather(*(session.close() for session in sessions))
    closed = time.perf_counter() - started
    row = [
        len(sessions),
        f"{filled:.1f}",
        f"{mib_per_session:.1f}",
        f"{shared:.1f}",
        milliseconds(times),
        f"{closed:.1f}",
    ]
    return [[str(cell) for cell in row]]


async def main(arguments: argparse.Namespace) -> None:
    async with await open_sandbox(arguments.mechanism, reduced=True, python=arguments.python) as sandbox:
        print(f"mechanism {sandbox.mechanism}, load {os.getloadavg()[0]:.1f}")
        opening = await measure_opening(sandbox)
        print_table("New interpreter, one call, close", ["what", "per second", "ms, median / 99 %"], opening)
        start = await measure_start(arguments.mechanism, arguments.python, 20 if arguments.held < 100 else 150)
        print_table("Session start, one after another", ["sessions", "ms, median", "95 %"], start)
        calls = await measure_calls(sandbox)
        header = ["at once", "sessions: calls/s", "ms, median / 99 %", "prototype: calls/s", "ratio"]
        header += ["new process: calls/s", "ms, median / 99 %"]
        print_table("Calls", header, calls)
        if importlib.util.find_spec("ipykernel") and importlib.util.find_spec("jupyter_client"):
            header = ["at once", "ipykernel: calls/s", "ms, median / 99 %", "and"]
            print_table("The same calls in ipykernel", header, [measure_kernel()])
        header = [
            "held",
            "s to open",
            "MB each (MemAvailable)",
            "MB each (PSS)",
            "call ms, median / 99 %",
            "s to close",
        ]
        print_table("Idle sessions open at once", header, await measure_holding(sandbox, arguments.held))
    resets = await measure_resets(0.5 if arguments.held < 100 else 4.0)
    print_table("Resets per second", ["environment", "1 instance", "16 instances"], resets)
    try:
        await measure_containers(arguments.image)
    except (SandboxUnavailable, ModuleNotFoundError) as error:
        print(f"containers: not measured ({error})")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--held", type=int, default=500)
    parser.add_argument("--quick", action="store_const", dest="held", const=40, help="hold only a few sessions")
    parser.add_argument("--mechanism")
    parser.add_argument("--python", help="the Python interpreter of the sessions")
    parser.add_argument("--image", help="an image on the engine of DOCKER_HOST; default: a temporary podman")
    asyncio.run(main(parser.parse_args()))
