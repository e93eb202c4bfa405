"""Instances in worker processes: used like any other, and ended with all their child processes."""

import asyncio
import contextlib
import ctypes
import importlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from agentfly import Environment, Task, tool
from agentfly.environment import InstanceHandle
from agentfly.errors import ConfigError, EnvironmentFault
from agentfly.resources.runtimes.process import ProcessRuntime
from agentfly.resources.supervisor import get_supervisor
from agentfly.threads import call
from agentfly.tooling import Context
from tests.descriptors import leaked_descriptors, open_descriptors

TASK = Task.of("Make it show 7.")
TREE = """
import os, signal, subprocess, sys, time
mark = sys.argv[1]
sleep = [sys.executable, "-c", "import time; time.sleep(600)", mark]
subprocess.Popen(sleep)
subprocess.Popen(sleep, start_new_session=True, env={})
os.kill(subprocess.Popen(sleep).pid, signal.SIGSTOP)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        subprocess.Popen(sleep)
        time.sleep(600)
    os._exit(0)
"""


class World(Environment):
    """A world that can be asked for anything."""

    def __init__(self) -> None:
        self.steps = 0

    @tool
    async def step(self, by: int = 1) -> str:
        """Go on."""
        self.steps += by
        return f"step {self.steps}"

    async def sleep(self, seconds: float) -> str:
        self.cancelled = False
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        return "slept"

    def nap(self, seconds: float) -> str:
        time.sleep(seconds)
        return "napped"

    def spin(self) -> None:
        while True:
            pass

    def hold_the_lock(self) -> None:
        ctypes.PyDLL(None).sleep(600)

    def who(self) -> list[Any]:
        return [os.getpid(), os.getppid(), os.getcwd(), dict(os.environ), len(os.listdir("/proc/self/fd"))]

    def kill(self, number: int) -> None:
        os.kill(os.getpid(), number)
        time.sleep(60)

    def leave(self, status: int) -> None:
        os._exit(status)

    def write(self, text: str) -> None:
        print(text)

    def big(self, size: int) -> bytes:
        return bytes(size)

    def spawn(self, mark: str) -> None:
        subprocess.run([sys.executable, "-c", TREE, mark], check=True)

    async def fork_and_hold(self) -> None:
        """A child that keeps this process's socket open."""
        if os.fork() == 0:
            signal.pause()


@pytest.fixture
async def create() -> AsyncIterator[Callable[[type[Environment]], Any]]:
    handles: list[InstanceHandle] = []

    async def make(kind: type[Environment] = World) -> InstanceHandle:
        handles.append(await ProcessRuntime().create(kind))
        return handles[-1]

    yield make
    await asyncio.gather(*(handle.terminate() for handle in handles))


def running(mark: str) -> list[str]:
    """The processes with a mark in their command line."""
    processes = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if mark in line and folder.name != str(os.getpid()):
                processes.append(f"{folder.name} {line[:80]}")
    return processes


def is_there(pid: int) -> list[int]:
    return [pid] if Path(f"/proc/{pid}").exists() else []


async def wait_for_tree(mark: str) -> None:
    """Wait for the four processes of TREE. No process reaps the one that starts the last."""
    for _ in range(2400):  # a minute
        if len(running(mark)) >= 4:
            return
        await asyncio.sleep(0.025)
    pytest.fail(f"processes of the tree after a minute: {running(mark)}")


async def none_left(look: Callable[[], list[Any]]) -> list[Any]:
    """What is left after some time; nothing, as soon as nothing is."""
    for _ in range(2400):  # a minute
        if not (left := look()):
            return []
        await asyncio.sleep(0.025)
    return left


async def test_worker_has_the_host_state(create: Any, monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setenv("SET_LATE", "yes")
    monkeypatch.chdir(tmp_path)
    env = (await create()).environment
    pid, _, folder, environ, files = await call(env.who)
    assert pid != os.getpid()
    assert (folder, environ["SET_LATE"]) == (str(tmp_path), "yes")
    assert str(os.getpid()) in environ.pop("AGENTFLY_OWNER")
    assert environ == {name: value for name, value in os.environ.items() if name != "AGENTFLY_OWNER"}
    assert files < 12


async def test_tools_and_attributes(create: Any) -> None:
    env = (await create()).environment
    result = await World.step.run({"by": 3}, context=Context(TASK), environments={World: env})
    assert (result.observation, env.steps) == ("step 3", 3)


async def test_class_defined_in_a_function(create: Any) -> None:
    class Local(World):
        async def twice(self, x: int) -> int:
            return x * 2

    env = (await create(Local)).environment
    assert await env.twice(4) == 8
    assert await env.step() == "step 1"


async def test_importable_class_is_imported(create: Any, monkeypatch: Any, tmp_path: Path) -> None:
    source = "import os\nfrom agentfly import Environment\nPID = os.getpid()\n"
    source += "class There(Environment):\n    async def ask(self): return PID\n"
    (tmp_path / "imported_there.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("imported_there")
    env = (await create(module.There)).environment
    assert await env.ask() not in (os.getpid(), module.PID)


async def test_many_at_once_each_in_order(create: Any) -> None:
    worlds = [(await create()).environment for _ in range(4)]
    steps = await asyncio.gather(*(world.step() for world in worlds for _ in range(50)))
    assert sorted(steps) == sorted(f"step {n}" for _ in worlds for n in range(1, 51))
    assert [world.steps for world in worlds] == [50] * 4


async def test_requests_overlap(create: Any) -> None:
    env = (await create()).environment
    slow = asyncio.create_task(call(env.nap, 30))
    assert await asyncio.gather(call(env.nap, 0.01), env.sleep(0.01), env.step()) == ["napped", "slept", "step 1"]
    slow.cancel()


async def test_cancelling_a_call_cancels_it_in_the_worker(create: Any) -> None:
    env = (await create()).environment
    task = asyncio.create_task(env.sleep(600))
    while not hasattr(env, "cancelled"):  # `sleep` has begun in the worker
        await env.step()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(60):
        while not env.cancelled:
            await env.step()


async def test_big_answers_and_requests(create: Any) -> None:
    env = (await create()).environment
    assert len(await call(env.big, 20 << 20)) == 20 << 20
    with pytest.raises(TypeError, match="returned more than 32768 KB"):
        await call(env.big, 40 << 20)
    with pytest.raises(TypeError, match="got an unexpected keyword argument"):
        await env.step(wrong=bytes(50 << 20))
    assert await env.step() == "step 1"


async def test_worker_output_goes_to_stderr(create: Any, capfd: Any) -> None:
    get_supervisor().close()  # the next one has the stderr of this test
    env = (await create()).environment
    await call(env.write, "hello from the worker")
    printed = capfd.readouterr()
    assert "hello from the worker" not in printed.out
    assert "hello from the worker" in printed.err
    await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda env: env.kill(signal.SIGKILL), "its process ended with signal 9, Killed"),
        (lambda env: env.kill(signal.SIGSEGV), "its process ended with signal 11"),
        (lambda env: env.leave(3), "its process ended with status 3"),
    ],
)
async def test_death_during_a_call_is_reported(create: Any, act: Any, message: str) -> None:
    handle = await create()
    env, other = handle.environment, (await create()).environment
    assert handle.exit_reason() is None
    waiting = asyncio.create_task(env.sleep(600))
    with pytest.raises(EnvironmentFault, match=message):
        await call(act, env)
    with pytest.raises(EnvironmentFault, match=message):
        await waiting
    with pytest.raises(EnvironmentFault, match=message):
        await env.step()
    assert message in handle.exit_reason()
    assert handle.memory() is None
    assert await other.step() == "step 1"


@pytest.mark.parametrize("method", ["spin", "hold_the_lock"])
async def test_hanging_worker_is_killed(create: Any, method: str) -> None:
    handle = await create()
    pid = (await call(handle.environment.who))[0]
    hung = asyncio.create_task(call(getattr(handle.environment, method)))
    await asyncio.sleep(0.1)
    await handle.terminate()
    with pytest.raises(EnvironmentFault, match="its process was ended"):
        await hung
    assert not is_there(pid)


async def test_all_descendants_end_with_the_worker(create: Any) -> None:
    doomed, killed, other = await create(), await create(), await create()
    marks = [f"tree-{os.getpid()}-{name}-" for name in ("doomed", "killed", "other")]
    for handle, mark in zip((doomed, killed, other), marks, strict=True):
        await call(handle.environment.spawn, mark)
        await wait_for_tree(mark)
    memory_before = doomed.memory()
    assert memory_before is not None
    assert memory_before > 20 << 20
    await doomed.terminate()
    assert running(marks[0]) == []
    with pytest.raises(EnvironmentFault):
        await call(killed.environment.kill, signal.SIGKILL)
    assert running(marks[1]) == []
    assert len(running(marks[2])) >= 4
    await other.terminate()
    assert running(marks[2]) == []


async def test_ending_twice_and_a_child_that_holds_the_socket(create: Any) -> None:
    handle = await create()
    await handle.environment.fork_and_hold()
    await asyncio.gather(handle.terminate(), handle.terminate())
    await handle.terminate()
    assert handle.exit_reason() == "its process was ended"
    with pytest.raises(EnvironmentFault, match="its process was ended"):
        await handle.environment.step()


async def test_cancelled_end_still_kills(create: Any) -> None:
    handle = await create()
    pid = (await call(handle.environment.who))[0]
    ending = asyncio.create_task(handle.terminate())
    await asyncio.sleep(0)
    ending.cancel()
    with contextlib.suppress(asyncio.CancelledError):  # it has ended before where the kill was quicker
        await ending
    assert await none_left(lambda: is_there(pid)) == []


async def test_failed_or_cancelled_create_leaves_nothing(tmp_path: Path) -> None:
    class Bad(Environment):
        def __init__(self) -> None:
            raise ValueError("no world")

    class Slow(Environment):
        def __init__(self) -> None:
            time.sleep(600)

    get_supervisor().register("folder", str(tmp_path))  # its control socket is open before and after
    descriptors_before = open_descriptors()
    with pytest.raises(ValueError, match="no world"):
        await ProcessRuntime().create(Bad)
    for seconds in (0.0, 0.001, 0.01, 0.1):
        housing = asyncio.create_task(ProcessRuntime().create(Slow))
        await asyncio.sleep(seconds)
        housing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await housing
    with pytest.raises(ConfigError, match="cannot be sent to a worker"):
        await ProcessRuntime().create(_class_with_a_lock())
    assert await leaked_descriptors(descriptors_before) == set()
    below = Path(f"/proc/{get_supervisor().pid}/task/{get_supervisor().pid}/children")
    assert await none_left(lambda: below.read_text().split()) == []


def _class_with_a_lock() -> type[Environment]:
    lock = threading.Lock()

    class Locked(Environment):
        async def act(self) -> None:
            lock.acquire()

    return Locked


def test_supervisor_is_shared_between_loops() -> None:
    async def once() -> str:
        handle = await ProcessRuntime().create(World)
        try:
            return str(await handle.environment.step())
        finally:
            await handle.terminate()

    assert [asyncio.run(once()) for _ in range(2)] == ["step 1", "step 1"]
