"""Whatever happens to a process that has workers, and to its keeper, nothing of them is left."""

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

import pytest

from agentfly.errors import EnvironmentFault
from agentfly.resources.keeper import Keeper, keeper, leftovers
from agentfly.resources.owner import process_name
from agentfly.resources.process import Process
from agentfly.resources.remote.serving import OWNER
from tests.resources.test_process import TREE, World, none_left

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

HOST = """
import asyncio, ctypes, os, sys, threading
from agentfly import Environment
from agentfly.resources.keeper import keeper
from agentfly.resources.process import Process

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
        keeper().remember("folder", folder)
        os.mkdir(folder)
        housed = await asyncio.gather(*(Process().house(World) for _ in range(2)))
        print(keeper().pid, flush=True)
        await asyncio.gather(*(each.environment.start() for each in housed))
        if MODE != "end":
            threading.Thread(target=housed[0].environment.hang, daemon=True).start()
        print("started", flush=True)
        if MODE == "stay":
            await asyncio.sleep(600)
        await asyncio.gather(*(each.end() for each in housed[MODE == "churn" :]))
        if MODE == "end":
            return

asyncio.run(main())
"""


def start_host(mark: str, mode: str) -> "subprocess.Popen[str]":
    line = [sys.executable, "-X", "dev", "-W", "error", "-c", HOST, TREE, mark, tempfile.gettempdir(), mode]
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def of_owner(owner: str, mark: str) -> list[str]:
    """Processes that carry the owner's mark, or were started below it; and its folders."""
    found = [str(path) for path in Path(tempfile.gettempdir()).glob(f"{mark}*")]
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            environ, line = (place / "environ").read_bytes(), (place / "cmdline").read_bytes()
            if owner.encode() in environ or (mark.encode() in line and b"-c\0\nimport asyncio" not in line):
                found.append(f"{place.name} {(place / 'comm').read_text().strip()}")
    return found


async def test_a_host_that_is_killed_at_any_moment_leaves_nothing() -> None:
    dice, few = random.Random(), asyncio.Semaphore(3)

    async def round_(number: int) -> list[str]:
        mark = f"keeper-{os.getpid()}-{number}-"
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


def test_a_keeper_that_has_only_just_been_started_is_not_taken_for_a_leftover() -> None:
    gone = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    marked = {**os.environ, OWNER: str(process_name(gone.pid))}
    gone.kill()
    gone.communicate()
    wait = "import time; time.sleep(60)"
    starting = subprocess.Popen([sys.executable, "-c", f"{wait} # {leftovers.PROGRAM}"], env=marked)
    stray = subprocess.Popen([sys.executable, "-c", wait], env=marked)
    try:
        leftovers.sweep("")
        assert stray.wait(10) == -signal.SIGKILL
        assert starting.poll() is None
    finally:
        for each in (starting, stray):
            each.kill()
            each.wait()


LAST_WORDS = """
import os, signal, sys
from agentfly.resources.keeper import keeper

keeper().remember("folder", sys.argv[1])
os.kill(keeper().pid, signal.SIGSTOP)
keeper().remember("folder", sys.argv[2])
print(keeper().pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


async def test_what_a_host_said_last_counts(tmp_path: Path) -> None:
    first, last = tmp_path / "first", tmp_path / "last"
    first.mkdir()
    last.mkdir()
    line = [sys.executable, "-c", LAST_WORDS, str(first), str(last)]
    host = await asyncio.create_subprocess_exec(*line, stdout=subprocess.PIPE)
    said, _ = await host.communicate()
    os.kill(int(said), signal.SIGCONT)
    assert await none_left(lambda: list(tmp_path.iterdir())) == []


async def test_what_host_and_keeper_left_when_both_were_killed_goes_at_the_next_start() -> None:
    mark = f"keeper-{os.getpid()}-both-"
    with start_host(mark, "stay") as host:
        owner = process_name(host.pid)
        assert owner is not None
        assert host.stdout is not None
        its_keeper = int(await asyncio.to_thread(host.stdout.readline))
        await asyncio.to_thread(host.stdout.readline)
        folder = Path(tempfile.mkdtemp(prefix=f"{owner}-"))
        os.kill(its_keeper, signal.SIGSTOP)
        host.kill()
        os.kill(its_keeper, signal.SIGKILL)
        host.wait()
    await asyncio.sleep(0.1)
    left = [each for each in of_owner(owner, mark) if not each.startswith("/")]
    assert left  # else there was nothing to find
    another = Keeper()
    try:
        worker = another.open()
        worker.line.close()
        # What was started with an empty environment carries no mark.
        assert await none_left(lambda: marked(owner)) == []
        assert await none_left(lambda: [str(folder)] * folder.exists()) == []
        await worker.over()
    finally:
        another.close()
        for each in of_owner(owner, mark):
            if each.startswith("/"):
                os.rmdir(each)
            else:
                os.kill(int(each.split()[0]), signal.SIGKILL)


def marked(owner: str) -> list[str]:
    return [f"{pid} {leftovers.name_of(pid)}" for pid, named in leftovers._marked() if named == owner]


async def test_a_keeper_that_is_killed_is_told_of_and_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    folder.mkdir()
    keeper().remember("folder", str(folder))
    housed = await Process().house(World)
    env, pid = housed.environment, keeper().pid
    assert pid is not None
    waiting = asyncio.create_task(env.sleep(600))  # type: ignore[attr-defined]
    await asyncio.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EnvironmentFault, match="the process that keeps its process was killed"):
        await waiting
    assert housed.death() == "the process that keeps its process was killed"
    await housed.end()
    again = await Process().house(World)
    assert keeper().pid != pid
    assert await again.environment.step() == "step 1"  # type: ignore[attr-defined]
    await again.end()
    keeper().close()
    assert not folder.exists()


async def test_a_guardian_that_is_killed_takes_its_worker_along() -> None:
    housed, other = await Process().house(World), await Process().house(World)
    mark = f"guardian-{os.getpid()}-"
    await asyncio.to_thread(housed.environment.spawn, mark)  # type: ignore[attr-defined]
    guardian = housed._worker.guardian  # type: ignore[attr-defined]
    os.kill(guardian, signal.SIGKILL)
    with pytest.raises(EnvironmentFault, match="its process was killed"):
        await housed.environment.sleep(600)  # type: ignore[attr-defined]
    assert await none_left(lambda: of_owner("nobody's mark", mark)) == []
    assert await other.environment.step() == "step 1"  # type: ignore[attr-defined]
    await asyncio.gather(housed.end(), other.end())


async def test_signals_meant_for_the_program_do_not_end_the_keeper() -> None:
    housed = await Process().house(World)
    pid = keeper().pid
    assert pid is not None
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(pid, number)
    assert os.getsid(pid) == pid != os.getsid(0)
    assert await housed.environment.step() == "step 1"  # type: ignore[attr-defined]
    assert keeper().pid == pid
    await housed.end()


async def test_no_zombies() -> None:
    for _ in range(3):
        housed = await Process().house(World)
        await asyncio.to_thread(housed.environment.spawn, f"zombie-{os.getpid()}-")  # type: ignore[attr-defined]
        await housed.end()
    below = Path(f"/proc/{keeper().pid}/task/{keeper().pid}/children")
    assert await none_left(lambda: below.read_text().split()) == []


def _in_a_fork(told: Any) -> None:
    async def use() -> str:
        housed = await Process().house(World)
        try:
            return str(await housed.environment.step())  # type: ignore[attr-defined]
        finally:
            await housed.end()

    before = keeper().pid
    told.send((before, asyncio.run(use()), keeper().pid))
    keeper().close()


async def test_a_fork_of_this_process_has_a_keeper_of_its_own() -> None:
    housed = await Process().house(World)
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=_in_a_fork, args=(theirs,))
    child.start()
    before, said, its_keeper = await asyncio.to_thread(ours.recv)
    await asyncio.to_thread(child.join)
    assert (before, said, child.exitcode) == (None, "step 1", 0)
    assert its_keeper != keeper().pid
    assert await housed.environment.step() == "step 1"  # type: ignore[attr-defined]
    await housed.end()
    ours.close(), theirs.close()


FORKED = """
import asyncio, os, sys, time
from agentfly import Environment
from agentfly.resources.process import Process

async def main():
    housed = await Process().house(Environment)
    if os.fork() == 0:
        time.sleep(600)
    print("forked", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def start_forking_host() -> "subprocess.Popen[str]":
    line = [sys.executable, "-c", FORKED]
    return subprocess.Popen(line, stdout=subprocess.PIPE, text=True, start_new_session=True)


async def test_a_host_whose_fork_lives_on_is_cleared_up_after() -> None:
    with start_forking_host() as host:
        assert host.stdout is not None
        await asyncio.to_thread(host.stdout.readline)
        owner = process_name(host.pid)
        assert owner is not None
        assert len(marked(owner)) == 3
        host.kill()
        assert await none_left(lambda: marked(owner)) == []
        os.killpg(host.pid, signal.SIGKILL)


def test_a_program_that_ends_leaves_nothing_and_says_nothing() -> None:
    mark = f"keeper-{os.getpid()}-ending-"
    with start_host(mark, "end") as host:
        _, said = host.communicate()
    assert (host.returncode, said) == (0, "")
    assert of_owner("nobody's mark", mark) == []


class Docker(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


@pytest.fixture
def docker(tmp_path: Path) -> Iterator[tuple[str, list[str]]]:
    """What there is of the Docker API here: it fails once, then deletes."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_DELETE(self) -> None:
            asked.append(self.path)
            self.send_response(500 if len(asked) == 1 else 204)
            self.end_headers()

        def address_string(self) -> str:
            return "a unix socket"

        def log_message(self, *_: Any) -> None:
            pass

    with Docker(str(tmp_path / "docker.sock"), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"unix://{tmp_path}/docker.sock", asked
        server.shutdown()
        thread.join()


def test_containers_are_removed_and_what_was_forgotten_is_not(docker: tuple[str, list[str]], tmp_path: Path) -> None:
    address, asked = docker
    one = Keeper()
    one.remember("container", f"{address} abc")
    one.remember("container", f"{address} kept")
    one.forget("container", f"{address} kept")
    one.forget("folder", str(tmp_path))
    one.close()
    one.close()
    assert asked == ["/containers/abc?force=1&v=1"] * 2
    with pytest.raises(ValueError, match="a keeper removes a folder or a container, not a 'cloud'"):
        one.remember("cloud", "x")


def test_a_keeper_that_cannot_run_is_an_error_that_says_so(monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    one = Keeper()
    with pytest.raises(OSError, match="ends as soon as it is started"):
        wait_for_refusal(one.remember)
    one.close()


def wait_for_refusal(remember: Callable[[str, str], None]) -> None:
    """An order may be taken by a keeper that has not yet failed; a later one finds out."""
    for number in range(1000):
        remember("folder", f"/nowhere/{number}")
