"""Sessions that are forked ahead of need: fresh, bounded in number, used once, and gone with their sandbox."""

import asyncio
import json
import os
import socket
import time
from collections.abc import AsyncIterator

import psutil
import pytest
import pytest_asyncio

from agentfly.sandbox import EndReason, Limits, LocalSandbox, SandboxUnavailable, channel, open_sandbox
from tests.descriptors import leaked_descriptors, open_descriptors
from tests.sandbox.test_leftovers import groups_and_folders, wait_for_none

pytestmark = pytest.mark.asyncio(loop_scope="session")
READY = 3


@pytest_asyncio.fixture(loop_scope="session")
async def sandbox() -> AsyncIterator[LocalSandbox]:
    try:
        opened = await open_sandbox(preload=(), ready_sessions=READY)
    except SandboxUnavailable as error:
        pytest.skip(f"no sandbox works here: {error}")
    async with opened:
        yield opened


async def wait_until_ready(sandbox: LocalSandbox) -> int:
    """Wait for the sessions that are being forked; the number of unused ones."""
    while sandbox._forking:
        await asyncio.gather(*sandbox._forking)
    return sum(len(ready.hosts) for ready in sandbox._ready.values())


async def test_no_more_sessions_than_declared_are_kept_ready(sandbox) -> None:
    limits = Limits(seconds=9)
    first = await sandbox.open_session(limits)
    assert await wait_until_ready(sandbox) == 0, "one session is no sign that more are needed"
    other_sessions = [await sandbox.open_session(limits) for _ in range(6)]
    assert await wait_until_ready(sandbox) == READY
    for session in (first, *other_sessions):
        await session.close()
    assert await wait_until_ready(sandbox) == READY


async def test_a_ready_session_is_handed_out_once(sandbox) -> None:
    for _ in range(3):
        sessions = await asyncio.gather(*(sandbox.open_session() for _ in range(8)))
        seen = await asyncio.gather(
            *(session.run("'mine' in globals(), __import__('os').listdir()") for session in sessions)
        )
        assert {outcome.value for outcome in seen} == {"(False, [])"}
        await asyncio.gather(*(session.run(f"mine = {number}") for number, session in enumerate(sessions)))
        await asyncio.gather(*(session.put("mine", b"") for session in sessions))
        outcomes = await asyncio.gather(*(session.run("mine") for session in sessions))
        assert [outcome.value for outcome in outcomes] == [str(number) for number in range(8)]
        await asyncio.gather(*(session.close() for session in sessions))
        await wait_until_ready(sandbox)


async def test_ready_sessions_draw_different_random_numbers(sandbox) -> None:
    values = set()
    for _ in range(6):
        session = await sandbox.open_session()
        await wait_until_ready(sandbox)
        values.add((await session.run("import random; random.random()")).value)
    assert len(values) == 6


async def test_ready_sessions_have_the_limits_of_the_caller(sandbox) -> None:
    for output in (100, 200) * 3:
        session = await sandbox.open_session(Limits(output=output))
        assert len((await session.run("print('x' * 1000)")).output) == output
        await wait_until_ready(sandbox)


async def test_limits_that_are_no_longer_used_keep_no_session_ready(sandbox) -> None:
    for seconds in range(1, 10):
        for _ in range(2):
            await (await sandbox.open_session(Limits(seconds=seconds))).close()
        assert await wait_until_ready(sandbox) <= 4


async def test_a_ready_session_that_died_is_not_handed_out(sandbox) -> None:
    for _ in range(3):
        await sandbox.open_session()
    assert await wait_until_ready(sandbox) > 0
    sandbox._zygote._process.kill()
    hosts = [host for ready in sandbox._ready.values() for host in ready.hosts]
    while not all(host.channel.hung_up() for host in hosts):
        await asyncio.sleep(0.01)
    session = await sandbox.open_session()
    assert (await session.run("6 * 7")).value == "42"


def wait_until_refused(listener: int) -> None:
    """Wait until no process listens, without letting the event loop run."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(f"/proc/self/fd/{listener}")
            except ConnectionRefusedError:
                return
        time.sleep(0.001)
    pytest.fail("the zygote still listens a minute after it was killed")


@pytest.mark.parametrize("requested", [False, True])
async def test_sessions_come_from_the_next_zygote_if_the_zygote_dies(sandbox, requested: bool) -> None:
    zygote = await sandbox.start()
    process = psutil.Process(zygote._process.pid)
    opening = asyncio.gather(*(sandbox.open_session() for _ in range(READY)))
    if requested:
        for member in (process, *process.children(recursive=True)):
            member.suspend()  # so that it dies between the request and its answer
        while len(zygote._exits) < READY:
            await asyncio.sleep(0)
    process.kill()
    wait_until_refused(zygote._listener)
    assert zygote.alive, "the event loop must not know of its end yet"
    assert [(await session.run("6 * 7")).value for session in await opening] == ["42"] * READY


async def test_nothing_is_left_of_ready_sessions() -> None:
    groups_before = set(groups_and_folders(os.getpid()))
    descriptors_before = open_descriptors()
    for wait in (True, False):
        async with await open_sandbox(preload=(), ready_sessions=READY) as sandbox:
            for _ in range(4):
                await sandbox.open_session()
            if wait:
                assert await wait_until_ready(sandbox) == READY
    assert await leaked_descriptors(descriptors_before) == set()
    assert await wait_for_none(lambda: sorted(set(groups_and_folders(os.getpid())) - groups_before)) == []


async def test_code_is_not_run_if_the_interpreter_died_before(sandbox) -> None:
    session = await sandbox.open_session()
    pid = (await session.run("import os, threading; os.getpid()")).value
    await session.run("threading.Timer(0.05, os._exit, (3,)).start()")
    await session.shell(f"while kill -0 {pid} 2>/dev/null; do sleep 0.01; done")
    outcome = await session.run("open('written', 'w')")
    assert outcome.end is EndReason.DIED
    assert "status 3" in outcome.message
    assert "was not run" in outcome.message
    assert await session.list_files() == []
    assert (await session.run("print('again')\n1")).text == "again\n1"


async def test_late_request_to_stop_a_command_does_not_stop_python(sandbox) -> None:
    session = await sandbox.open_session()
    await session.run("import time; kept = 5")
    for step in ("interrupt", "restart"):
        request = json.dumps({"do": step, "why": "killed"}).encode()
        await session._host.channel.send(channel.QUESTION, request)
        await session.list_files()  # the session init has handled the request
        outcome = await session.run("kept")
        assert (outcome.end, outcome.value) == (EndReason.OK, "5")
