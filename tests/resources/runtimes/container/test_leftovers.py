"""No container is left, however a session, its process or the engine ends."""

import asyncio
import contextlib
import gc
import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from agentfly.errors import EnvironmentFault
from agentfly.resources.runtimes.container import Container, ContainerSandbox
from agentfly.sandbox import EndReason, Session, SessionClosed, open_sandbox
from agentfly.sandbox.owner import process_name
from tests.descriptors import leaked_descriptors, open_descriptors
from tests.resources.engine import IMAGE, Podman
from tests.resources.runtimes.container.conftest import SMALL, UNCONNECTED

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.usefixtures("docker_host")]


def mine(engine: Podman, pid: int = 0) -> list[str]:
    """The containers of a process: this one, or another."""
    return [name for name in engine.containers() if name.startswith(f"agentfly-{pid or os.getpid()}-")]


async def wait_until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not await asyncio.to_thread(holds):
            await asyncio.sleep(0.05)


async def test_a_container_killed_from_outside(session: Session, engine: Podman) -> None:
    running = asyncio.create_task(session.run("import time; time.sleep(30)"))
    await asyncio.sleep(0.2)
    with engine.client() as client:
        client.kill(session._host.name)
    outcome = await running
    assert (outcome.end, outcome.files_kept) == (EndReason.DIED, False)
    assert "signal 9" in outcome.message
    with pytest.raises(SessionClosed):
        await session.run("1")
    assert session._host.name not in engine.containers()
    await session.reset()
    assert (await session.run("1 + 1")).value == "2"


async def test_opening_may_be_cancelled(sandbox: ContainerSandbox, engine: Podman) -> None:
    containers, cells = set(mine(engine)), set(sandbox._hosts)  # others' may go meanwhile, and none may come
    for delay in (0, 0.02, 0.06, 0.1, 0.2, 0.3):
        opening = asyncio.create_task(sandbox.open_session(SMALL))
        await asyncio.sleep(delay)
        opening.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await (await opening).close()
    await wait_until(lambda: containers.issuperset(mine(engine)) and cells.issuperset(sandbox._hosts))


async def test_closing_leaves_nothing(engine: Podman) -> None:
    descriptors, containers_before = open_descriptors(), mine(engine)
    async with await open_sandbox(Container(image=IMAGE)) as sandbox:
        sessions = await asyncio.gather(*(sandbox.open_session(SMALL) for _ in range(3)))
        hanging = asyncio.create_task(sessions[0].run("import time; time.sleep(60)"))
        await sessions[1].close()
        await sessions[1].close()
        await sessions[2].pause()
        assert len(mine(engine)) == len(containers_before) + 2
    assert (await hanging).end is EndReason.DIED
    assert mine(engine) == containers_before
    with pytest.raises(EnvironmentFault, match="closed"):
        await sandbox.open_session()
    assert await leaked_descriptors(descriptors) == set()


HOST = """
import asyncio
from agentfly.resources.runtimes.container import Container
from agentfly.sandbox import open_sandbox

async def main():
    sandbox = await open_sandbox(Container(image="IMAGE"))
    sessions = await asyncio.gather(*(sandbox.open_session() for _ in range(2)))
    await sessions[0].pause()
    print("open", flush=True)
    await sessions[1].run("import time; time.sleep(600)", timeout=600)

asyncio.run(main())
""".replace("IMAGE", IMAGE)


def start_host() -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-c", HOST], stdout=subprocess.PIPE, text=True)


async def test_a_killed_process_leaves_nothing(engine: Podman) -> None:
    process = start_host()
    try:
        assert await asyncio.to_thread(process.stdout.readline) == "open\n"
        assert len(mine(engine, process.pid)) == 2
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    await wait_until(lambda: mine(engine, process.pid) == [])


async def test_next_start_removes_leftover_containers(engine: Podman, sandbox: ContainerSandbox) -> None:
    """Of another machine's processes nothing can be seen: only what has stopped counts as left behind."""
    dead = (process_name(os.getpid()) or "").replace(str(os.getpid()), "1000000000")
    from agentfly.resources.runtimes.container.engine import BOOT_LABEL, OWNER_LABEL, owner_labels  # needs docker

    here, labels_elsewhere = {**owner_labels(), OWNER_LABEL: dead}, {OWNER_LABEL: dead, BOOT_LABEL: "another"}
    running, stopped = ["sleep", "600"], ["true"]
    session = await sandbox.open_session(SMALL)
    with engine.client() as client:
        for name, labels, line in (
            ("a", here, running),
            ("b", labels_elsewhere, running),
            ("c", labels_elsewhere, stopped),
        ):
            alone = client.create_host_config(network_mode="none")
            client.create_container(IMAGE, entrypoint=line, name=f"test-{name}", labels=labels, host_config=alone)
            client.start(f"test-{name}")
        client.wait("test-c")
        async with await open_sandbox(Container(image=IMAGE)):
            assert [name for name in engine.containers() if name.startswith("test-")] == ["test-b"]
        client.remove_container("test-b", force=True)
    assert (await session.run("1")).ok, "its owner lives"
    await session.close()


async def use_an_engine_that_goes(engine: Podman) -> None:
    sandbox = await open_sandbox(Container(image=IMAGE))
    session = await sandbox.open_session(SMALL)
    engine.stop()
    with pytest.raises(EnvironmentFault, match="container engine"):
        await session.run("1")
    with pytest.raises(SessionClosed):
        await session.run("1")
    with pytest.raises(EnvironmentFault, match="container engine is gone"):
        await sandbox.open_session(SMALL)
    with pytest.raises(EnvironmentFault, match="container engine"):
        await session.close()
    await sandbox.close()


@UNCONNECTED
async def test_lost_engine_is_a_fault(engine: Podman) -> None:
    try:
        await use_an_engine_that_goes(engine)
    finally:
        engine.start()
    gc.collect()
