"""A process with workers and its supervisor leave nothing behind, however they end."""

import asyncio
import contextlib
import http.server
import multiprocessing
import os
import random
import signal
import socketserver
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

from agentfly.errors import EnvironmentFault
from agentfly.resources.rpc.server import OWNER
from agentfly.resources.runtimes.process import ProcessRuntime
from agentfly.resources.supervisor import Supervisor, get_supervisor
from agentfly.resources.supervisor import process as supervisor_process
from agentfly.sandbox.owner import process_name
from tests.resources.runtimes.test_process import TREE, World, none_left

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

HOST = """
import asyncio, ctypes, os, sys, threading
from agentfly import Environment
from agentfly.resources.supervisor import get_supervisor
from agentfly.resources.runtimes.process import ProcessRuntime

TREE, MARK, FOLDER, MODE = sys.argv[1:]

class World(Environment):
    async def start(self):
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", TREE, MARK)
        await process.wait()
    def hang(self):
        while True:
            ctypes.PyDLL(None).sleep(600)

async def main():
    while True:
        folder = FOLDER + "/" + MARK + os.urandom(4).hex()
        get_supervisor().register("folder", folder)
        os.mkdir(folder)
        handle = await asyncio.gather(*(ProcessRuntime().create(World) for _ in range(2)))
        print(get_supervisor().pid, flush=True)
        await asyncio.gather(*(each.environment.start() for each in handle))
        if MODE != "end":
            threading.Thread(target=handle[0].environment.hang, daemon=True).start()
        print("started", flush=True)
        if MODE == "stay":
            await asyncio.sleep(600)
        await asyncio.gather(*(each.terminate() for each in handle[MODE == "churn" :]))
        if MODE == "end":
            return

asyncio.run(main())
"""


def start_host(mark: str, mode: str) -> "subprocess.Popen[str]":
    line = [sys.executable, "-X", "dev", "-W", "error", "-c", HOST, TREE, mark, tempfile.gettempdir(), mode]
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def of_owner(owner: str, mark: str) -> list[str]:
    """Processes that carry the owner's mark, or were started below it; and its folders."""
    leftovers = [str(path) for path in Path(tempfile.gettempdir()).glob(f"{mark}*")]
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            environ, line = (folder / "environ").read_bytes(), (folder / "cmdline").read_bytes()
            if owner.encode() in environ or (mark.encode() in line and b"-c\0\nimport asyncio" not in line):
                leftovers.append(f"{folder.name} {(folder / 'comm').read_text().strip()}")
    return leftovers


async def test_killed_host_leaves_nothing() -> None:
    dice, few = random.Random(), asyncio.Semaphore(3)

    async def round_(number: int) -> list[str]:
        mark = f"supervisor-{os.getpid()}-{number}-"
        async with few:
            with start_host(mark, "churn") as host:
                owner = process_name(host.pid)
                assert owner is not None
                assert host.stdout is not None
                if number % 3:
                    await asyncio.to_thread(host.stdout.readline)
                if number % 3 == 2:
                    await asyncio.to_thread(host.stdout.readline)
                await asyncio.sleep(dice.uniform(0, 0.8))
                host.kill()
                host.wait()
            return await none_left(lambda: of_owner(owner, mark))

    assert await asyncio.gather(*map(round_, range(12))) == [[]] * 12


def test_starting_supervisor_is_not_swept() -> None:
    gone = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    marked = {**os.environ, OWNER: str(process_name(gone.pid))}
    gone.kill()
    gone.communicate()
    wait = "import time; time.sleep(60)"
    starting = subprocess.Popen([sys.executable, "-c", f"{wait} # {supervisor_process.PROGRAM}"], env=marked)
    stray = subprocess.Popen([sys.executable, "-c", wait], env=marked)
    try:
        supervisor_process.sweep("")
        assert stray.wait(60) == -signal.SIGKILL
        assert starting.poll() is None
    finally:
        for process in (starting, stray):
            process.kill()
            process.wait()


LAST_WORDS = """
import os, signal, sys
from agentfly.resources.supervisor import get_supervisor

get_supervisor().register("folder", sys.argv[1])
os.kill(get_supervisor().pid, signal.SIGSTOP)
get_supervisor().register("folder", sys.argv[2])
print(get_supervisor().pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


async def test_last_commands_of_killed_host_are_executed(tmp_path: Path) -> None:
    first, last = tmp_path / "first", tmp_path / "last"
    first.mkdir()
    last.mkdir()
    line = [sys.executable, "-c", LAST_WORDS, str(first), str(last)]
    host = await asyncio.create_subprocess_exec(*line, stdout=subprocess.PIPE)
    output, _ = await host.communicate()
    os.kill(int(output), signal.SIGCONT)
    assert await none_left(lambda: list(tmp_path.iterdir())) == []


async def test_leftovers_of_killed_host_supervisor_and_guardians_are_swept_at_next_start() -> None:
    mark = f"supervisor-{os.getpid()}-both-"
    with start_host(mark, "stay") as host:
        owner = process_name(host.pid)
        assert owner is not None
        assert host.stdout is not None
        its_supervisor = int(await asyncio.to_thread(host.stdout.readline))
        await asyncio.to_thread(host.stdout.readline)
        folder = Path(tempfile.mkdtemp(prefix=f"{owner}-"))
        os.kill(its_supervisor, signal.SIGSTOP)
        host.kill()
        for guardian in psutil.Process(its_supervisor).children():
            guardian.kill()
        os.kill(its_supervisor, signal.SIGKILL)
        host.wait()
    await asyncio.sleep(0.1)
    left = [process for process in of_owner(owner, mark) if not process.startswith("/")]
    assert left  # else there was nothing to find
    another = Supervisor()
    try:
        worker = another.open()
        worker.socket.close()
        # What was started with an empty environment carries no mark.
        assert await none_left(lambda: list_marked_processes(owner)) == []
        assert await none_left(lambda: [str(folder)] * folder.exists()) == []
        await worker.wait()
    finally:
        another.close()
        for process in of_owner(owner, mark):
            if process.startswith("/"):
                os.rmdir(process)
            else:
                os.kill(int(process.split()[0]), signal.SIGKILL)


def list_marked_processes(owner: str) -> list[str]:
    return [f"{process.pid} {process.name()}" for process, named in supervisor_process.iter_owners() if named == owner]


async def test_killed_supervisor_is_reported_and_restarted(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    folder.mkdir()
    get_supervisor().register("folder", str(folder))
    handle = await ProcessRuntime().create(World)
    env, pid = handle.environment, get_supervisor().pid
    assert pid is not None
    waiting = asyncio.create_task(env.sleep(600))  # type: ignore[attr-defined]
    await asyncio.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EnvironmentFault, match="the supervisor of its process was killed"):
        await waiting
    assert handle.exit_reason() == "the supervisor of its process was killed"
    await handle.terminate()
    again = await ProcessRuntime().create(World)
    assert get_supervisor().pid != pid
    assert await again.environment.step() == "step 1"  # type: ignore[attr-defined]
    await again.terminate()
    get_supervisor().close()
    assert not folder.exists()


async def test_worker_dies_with_killed_guardian() -> None:
    handle, other = await ProcessRuntime().create(World), await ProcessRuntime().create(World)
    mark = f"guardian-{os.getpid()}-"
    await asyncio.to_thread(handle.environment.spawn, mark)  # type: ignore[attr-defined]
    guardian = handle._worker.guardian  # type: ignore[attr-defined]
    os.kill(guardian, signal.SIGKILL)
    with pytest.raises(EnvironmentFault, match="its process was killed"):
        await handle.environment.sleep(600)  # type: ignore[attr-defined]
    assert await none_left(lambda: of_owner("no owner", mark)) == []
    assert await other.environment.step() == "step 1"  # type: ignore[attr-defined]
    await asyncio.gather(handle.terminate(), other.terminate())


async def test_terminal_signals_do_not_end_the_supervisor() -> None:
    handle = await ProcessRuntime().create(World)
    pid = get_supervisor().pid
    assert pid is not None
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(pid, number)
    assert os.getsid(pid) == pid != os.getsid(0)
    assert await handle.environment.step() == "step 1"  # type: ignore[attr-defined]
    assert get_supervisor().pid == pid
    await handle.terminate()


async def test_no_zombies() -> None:
    for _ in range(3):
        handle = await ProcessRuntime().create(World)
        await asyncio.to_thread(handle.environment.spawn, f"zombie-{os.getpid()}-")  # type: ignore[attr-defined]
        await handle.terminate()
    below = Path(f"/proc/{get_supervisor().pid}/task/{get_supervisor().pid}/children")
    assert await none_left(lambda: below.read_text().split()) == []


def _in_a_fork(connection: Any) -> None:
    async def use() -> str:
        handle = await ProcessRuntime().create(World)
        try:
            return str(await handle.environment.step())  # type: ignore[attr-defined]
        finally:
            await handle.terminate()

    parent_supervisor = get_supervisor().pid
    connection.send((parent_supervisor, asyncio.run(use()), get_supervisor().pid))
    get_supervisor().close()


async def test_forked_process_has_its_own_supervisor() -> None:
    handle = await ProcessRuntime().create(World)
    parent_end, child_end = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=_in_a_fork, args=(child_end,))
    child.start()
    parent_supervisor, output, its_supervisor = await asyncio.to_thread(parent_end.recv)
    await asyncio.to_thread(child.join)
    assert (parent_supervisor, output, child.exitcode) == (None, "step 1", 0)
    assert its_supervisor != get_supervisor().pid
    assert await handle.environment.step() == "step 1"  # type: ignore[attr-defined]
    await handle.terminate()
    parent_end.close(), child_end.close()


FORKED = """
import asyncio, os, sys, time
from agentfly import Environment
from agentfly.resources.runtimes.process import ProcessRuntime

async def main():
    handle = await ProcessRuntime().create(Environment)
    if os.fork() == 0:
        time.sleep(600)
    print("forked", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def start_forking_host() -> "subprocess.Popen[str]":
    line = [sys.executable, "-c", FORKED]
    return subprocess.Popen(line, stdout=subprocess.PIPE, text=True, start_new_session=True)


async def test_cleanup_after_host_whose_fork_lives_on() -> None:
    with start_forking_host() as host:
        assert host.stdout is not None
        await asyncio.to_thread(host.stdout.readline)
        owner = process_name(host.pid)
        assert owner is not None
        assert len(list_marked_processes(owner)) == 3
        host.kill()
        assert await none_left(lambda: list_marked_processes(owner)) == []
        os.killpg(host.pid, signal.SIGKILL)


def test_program_exit_leaves_nothing_and_prints_nothing() -> None:
    mark = f"supervisor-{os.getpid()}-ending-"
    with start_host(mark, "end") as host:
        _, errors = host.communicate()
    assert (host.returncode, errors) == (0, "")
    assert of_owner("no owner", mark) == []


class Docker(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


@pytest.fixture
def docker(tmp_path: Path) -> Iterator[tuple[str, list[str]]]:
    """What there is of the Docker API here: it fails once, then deletes."""
    pytest.importorskip("docker")
    requests: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path == "/version"
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"ApiVersion": "1.41"}')

        def do_DELETE(self) -> None:
            requests.append(self.path)
            self.send_response(500 if len(requests) == 1 else 204)
            self.end_headers()

        def address_string(self) -> str:
            return "a unix socket"

        def log_message(self, *_: Any) -> None:
            pass

    with Docker(str(tmp_path / "docker.sock"), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"unix://{tmp_path}/docker.sock", requests
        server.shutdown()
        thread.join()


def test_only_registered_containers_are_removed(docker: tuple[str, list[str]], tmp_path: Path) -> None:
    address, requests = docker
    one = Supervisor()
    one.register("container", f"{address} abc")
    one.register("container", f"{address} kept")
    one.unregister("container", f"{address} kept")
    one.unregister("folder", str(tmp_path))
    one.close()
    one.close()
    assert requests == ["/v1.41/containers/abc?v=True&link=False&force=True"] * 2
    with pytest.raises(ValueError, match="a supervisor removes a folder or a container, not a 'cloud'"):
        one.register("cloud", "x")


def test_supervisor_that_cannot_run_is_an_error(monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    one = Supervisor()
    with pytest.raises(OSError, match="ends as soon as it is started"):
        wait_for_refusal(one.register)
    one.close()


def wait_for_refusal(register: Callable[[str, str], None]) -> None:
    """A command may be accepted by a supervisor that has not failed yet; a later one raises."""
    for number in range(1000):
        register("folder", f"/nowhere/{number}")
