"""Sessions leave no processes and files, however the process that opened them ends."""

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from agentfly.sandbox import SandboxUnavailable, open_sandbox
from agentfly.sandbox.cgroups import Cgroups
from agentfly.sandbox.local import make_folder
from tests.descriptors import leaked_descriptors, open_descriptors

pytestmark = pytest.mark.asyncio(loop_scope="session")
HOST = """
import asyncio, sys
from agentfly.sandbox import Limits, open_sandbox

BUSY = '''
import os, subprocess
subprocess.Popen(['sleep', '{seconds}'])
if os.fork() == 0:
    os.setsid()
    while True:
        pass
'''

async def main(mechanism, token, seconds):
    sandbox = await open_sandbox(mechanism, reduced=True, preload=(token,))
    print("open", flush=True)
    while True:
        sessions = await asyncio.gather(*(sandbox.open_session(Limits(cpus=0.1)) for _ in range(3)))
        await asyncio.gather(*(s.run(BUSY.replace('{seconds}', seconds), timeout=0.2) for s in sessions))
        await sessions[0].close()
        await sessions[1].reset()
        print("round", flush=True)

asyncio.run(main(*sys.argv[1:]))
"""


def start_host(*arguments: str) -> "subprocess.Popen[str]":
    line = [sys.executable, "-c", HOST, *arguments]
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def alive(*tokens: str) -> list[str]:
    """Command lines of running processes that hold one of the tokens."""
    processes = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = file.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if any(token in line for token in tokens):
            processes.append(f"{file.parent.name}: {line[:100]}")
    return processes


async def wait_for_none(look: Callable[[], list[str]]) -> list[str]:
    for _ in range(1200):  # a minute
        left = look()
        if not left:
            return []
        await asyncio.sleep(0.05)
    return left


def groups_and_folders(pid: int) -> list[str]:
    """Cgroups and folders of a process's sessions. Sandboxes that other tests share keep sessions ready."""
    leftovers = [str(path) for path in Path(tempfile.gettempdir()).glob(f"agentfly-{pid}-*")]
    groups = Cgroups.find()
    if isinstance(groups, Cgroups):
        leftovers += [str(path) for parent in set(groups.parents.values()) for path in parent.glob(f"agentfly-{pid}-*")]
    return leftovers


async def require(mechanism: str) -> None:
    try:
        await (await open_sandbox(mechanism, reduced=True, preload=())).close()
    except SandboxUnavailable as error:
        pytest.skip(f"the {mechanism} sandbox does not work here: {error}")


@pytest.mark.parametrize("mechanism", ["zygote", "namespaces", "landlock", "unsafe"])
@pytest.mark.parametrize("seed", [0, 1, pytest.param(2, marks=pytest.mark.slow_smoke)])
async def test_kill_at_any_moment_leaves_nothing(mechanism: str, seed: int) -> None:
    await require(mechanism)
    chance = random.Random(f"{mechanism}{seed}{time.time_ns()}")
    token, seconds = f"token{chance.getrandbits(60)}", str(chance.randint(80_000_000, 90_000_000))
    host = start_host(mechanism, token, seconds)
    try:
        if seed:
            assert host.stdout.readline() == "open\n"
        await asyncio.sleep(chance.uniform(0, 1.0))
        processes = alive(token, seconds)
    finally:
        host.kill()
        host.wait()
        host.stdout.close()
    assert processes or not seed
    assert await wait_for_none(lambda: alive(token, seconds)) == []

    def left_after_next_start() -> list[str]:
        make_folder(None).rmdir()  # every start removes the folders and cgroups of dead processes
        return groups_and_folders(host.pid)

    assert await wait_for_none(left_after_next_start) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_signal_leaves_nothing(number: int) -> None:
    await require("namespaces")
    token = f"token{random.getrandbits(60)}"
    host = start_host("namespaces", token, "81000000")
    assert host.stdout.readline() == "open\n"
    assert host.stdout.readline() == "round\n"
    host.send_signal(number)
    host.wait(60)
    host.stdout.close()
    assert await wait_for_none(lambda: alive(token)) == []
    assert await wait_for_none(lambda: groups_and_folders(host.pid)) == []


@pytest.mark.parametrize("mechanism", ["zygote", "namespaces", "landlock", "unsafe"])
async def test_closing_leaves_nothing(mechanism: str) -> None:
    await require(mechanism)
    token = f"token{random.getrandbits(60)}"
    groups_before = set(groups_and_folders(os.getpid()))
    descriptors_before = open_descriptors()
    async with await open_sandbox(mechanism, reduced=True, preload=(token,)) as sandbox:
        sessions = await asyncio.gather(*(sandbox.open_session() for _ in range(5)))
        await sessions[0].run("import subprocess; subprocess.Popen(['sleep', '82000000'], start_new_session=True)")
        await sessions[1].close()
        hanging = asyncio.create_task(sessions[2].run("import time; time.sleep(60)"))
        await asyncio.sleep(0.05)
        assert alive(token)
    await hanging
    assert alive(token, "82000000") == []
    assert set(groups_and_folders(os.getpid())) <= groups_before
    assert await leaked_descriptors(descriptors_before) == set()


LOCKED_FOLDERS = """
async def main():
    async with await open_sandbox("landlock", reduced=True, preload=()) as sandbox:
        session = await sandbox.open_session()
        made = await session.run("import os; os.makedirs('a/b'); open('a/b/c', 'w').close(); os.mkdir('d', 0); "
                                 "os.mkdir('e', 0o300); os.mkdir('e/f', 0); os.umask(0o777); os.mkdir('g')")
        return [made.ok, os.path.isdir(session.folder), await session.close(), os.path.exists(session.folder)]
"""


async def test_folders_without_rights_are_removed(as_ordinary_user) -> None:
    assert as_ordinary_user(LOCKED_FOLDERS) == [True, True, None, False]


async def test_deeply_nested_folders_are_removed(open_session) -> None:
    session = await open_session("landlock")
    # Deeper than the recursion limit, and longer than a path may be.
    outcome = await session.run("import os\nfor _ in range(1100):\n    os.mkdir('deep')\n    os.chdir('deep')")
    assert outcome.ok, outcome.text
    folder = Path(session.folder)
    assert folder in set(folder.parent.iterdir())
    await session.close()
    assert folder not in set(folder.parent.iterdir())


async def test_opening_may_be_cancelled() -> None:
    await require("namespaces")
    groups_before = set(groups_and_folders(os.getpid()))
    async with await open_sandbox("namespaces", preload=()) as sandbox:
        for delay in (0, 0.0005, 0.001, 0.003, 0.006, 0.01):
            opening = asyncio.create_task(sandbox.open_session())
            await asyncio.sleep(delay)
            opening.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await (await opening).close()
        session = await sandbox.open_session()
        assert (await session.run("1")).value == "1"
    assert set(groups_and_folders(os.getpid())) <= groups_before
