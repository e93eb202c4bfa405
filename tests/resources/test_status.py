"""The status of running managers, over real sockets between real processes."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentfly import Environment
from agentfly.environment import Pool
from agentfly.errors import ConfigError, EnvironmentFault
from agentfly.resources import ResourceManager, status
from agentfly.sandbox.owner import process_name
from agentfly.types import Task

TASK = Task.of("Make it show 7.", "seven")
OTHER_PROCESS = """
import asyncio, sys, time
from agentfly import Environment
from agentfly.resources import ResourceManager, status
from agentfly.types import Task

class Counter(Environment): ...

async def main():
    async with ResourceManager().leases(Task.of("?", "theirs"), [Counter], chain="3/1") as leases:
        await leases.get(Counter)
        while not await status.read_statuses():
            await asyncio.sleep(0.01)
        print("held", flush=True)
        if sys.argv[1] == "blocked":
            time.sleep(600)
        await asyncio.sleep(600)

asyncio.run(main())
"""


class Counter(Environment):
    pool = Pool(max_instances=2)


class Broken(Environment):
    async def start(self) -> None:
        raise ConfigError("no such disk")


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for the sockets of this test; its path must be short."""
    tmp_path_factory.getbasetemp()  # pytest's own temporary folder is created outside of this one
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


@pytest.fixture
def other() -> Iterator[subprocess.Popen[str]]:
    yield from _other("asleep")


@pytest.fixture
def blocked_process() -> Iterator[subprocess.Popen[str]]:
    yield from _other("blocked")


def _other(how: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", OTHER_PROCESS, how], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


async def wait_for_statuses(count: int) -> list[status.ManagerStatus]:
    """The reports, once so many managers listen."""
    async with asyncio.timeout(60):
        while len(found := await status.read_statuses()) != count:
            await asyncio.sleep(0.01)
    return found


async def test_status_has_metrics_and_lease_holders() -> None:
    manager = ResourceManager()
    async with manager.leases(TASK, [Counter], chain="0/1") as leases:
        await leases.get(Counter)
        [report] = await wait_for_statuses(1)
        [figures] = report.pools
        [lease] = figures.leases
        assert (report.pid, report.error) == (os.getpid(), "")
        assert (figures.environment, figures.runtime, figures.leased, figures.max_instances) == (
            "Counter",
            "in_process",
            1,
            2,
        )
        assert (lease.holders[0].chain, lease.holders[0].task) == ("0/1", "seven")
        assert lease.seconds > 0
        assert figures.seconds["start"]["count"] == 1
        assert json.loads(json.dumps(report.to_json()))["pools"][0]["environment"] == "Counter"
    await manager.close()


async def test_status_reports_why_starts_fail() -> None:
    manager = ResourceManager()
    async with manager.leases(TASK, [Broken]) as leases:
        with pytest.raises(EnvironmentFault):
            await leases.get(Broken)
    [report] = await wait_for_statuses(1)
    assert "no such disk" in report.pools[0].broken
    await manager.close()


async def test_several_managers_and_loops_of_one_process() -> None:
    first, second, held, done = ResourceManager(), ResourceManager(), threading.Event(), threading.Event()

    async def elsewhere() -> None:
        await first.warm_up([Counter])
        await asyncio.sleep(0)
        held.set()
        while not done.is_set():
            await asyncio.sleep(0.01)

    thread = threading.Thread(target=lambda: asyncio.run(elsewhere()))
    thread.start()
    try:
        await first.warm_up([Counter])
        await second.warm_up([Counter])
        assert {report.pid for report in await wait_for_statuses(3)} == {os.getpid()}
    finally:
        done.set()
        thread.join()
    assert len(await wait_for_statuses(2)) == 2
    await first.close()
    await second.close()
    assert await wait_for_statuses(0) == []


async def test_loop_shutdown_closes_everything(runtime: Path) -> None:
    async def forgetful() -> None:
        await ResourceManager().warm_up([Counter])
        await asyncio.sleep(0.01)

    await asyncio.to_thread(asyncio.run, forgetful())
    assert list((runtime / "agentfly").iterdir()) == []


async def test_status_server_does_not_keep_the_manager_alive() -> None:
    manager = ResourceManager()
    await manager.warm_up([Counter])
    await wait_for_statuses(1)
    gone = weakref.ref(manager._allocator)
    del manager
    async with asyncio.timeout(60):
        while gone() is not None:
            gc.collect()
            await asyncio.sleep(0.01)
    assert await wait_for_statuses(0) == []


@pytest.mark.integration
async def test_status_of_another_process(other: subprocess.Popen[str], runtime: Path) -> None:
    [report] = await wait_for_statuses(1)
    assert report.pid == other.pid
    assert str(report.pools[0].leases[0]).startswith("chain 3/1 (theirs) for ")
    other.send_signal(signal.SIGKILL)
    other.wait()
    assert len(list((runtime / "agentfly").iterdir())) == 1
    assert await status.read_statuses() == []
    assert list((runtime / "agentfly").iterdir()) == []


@pytest.mark.integration
async def test_status_of_process_with_blocked_loop(
    blocked_process: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "TIMEOUT", 0.3)
    [report] = await status.read_statuses()
    assert report.pid == blocked_process.pid
    assert "does not answer" in report.error


async def test_refusing_socket_is_removed(runtime: Path) -> None:
    folder = runtime / "agentfly"
    folder.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(folder / f"{process_name(os.getpid())}-99"))
    assert await status.read_statuses() == []
    assert list(folder.iterdir()) == []


async def test_status_of_another_version_is_reported(runtime: Path) -> None:
    folder = runtime / "agentfly"
    folder.mkdir(mode=0o700)

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'{"command": "x", "pools": [{"leases": [], "colour": "red"}]}')
        writer.close()

    async with await asyncio.start_unix_server(answer, folder / f"{process_name(os.getpid())}-99"):
        [report] = await status.read_statuses()
    assert "another version" in report.error


async def test_directory_open_to_others_is_not_used(
    runtime: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(runtime / "nowhere"))
    (runtime / "agentfly").mkdir()
    (runtime / "agentfly").chmod(0o777)
    with caplog.at_level(logging.DEBUG, status.__name__):
        await _works()
    assert "only this user can open" in caplog.text
    with pytest.raises(ConfigError, match="set XDG_RUNTIME_DIR"):
        await status.read_statuses()


@pytest.mark.parametrize("runtime_folder", ["nowhere", "x" * 120, "file/below"])
async def test_run_continues_without_status_socket(
    runtime: Path, runtime_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (runtime / "file").touch()
    if len(runtime_folder) > 100:
        (runtime / runtime_folder).mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime / runtime_folder))
    monkeypatch.setattr(tempfile, "tempdir", str(runtime / runtime_folder))
    await _works()
    assert await status.read_statuses() == []


async def test_second_directory_is_used_if_the_first_fails(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime / "nowhere"))
    manager = ResourceManager()
    await manager.warm_up([Counter])
    await wait_for_statuses(1)
    assert len(list((runtime / f"agentfly-{os.getuid()}").iterdir())) == 1
    await manager.close()


async def _works() -> None:
    manager = ResourceManager()
    async with manager.leases(TASK, [Counter]) as leases:
        assert isinstance(await leases.get(Counter), Counter)
        await asyncio.sleep(0.01)
    await manager.close()


@pytest.mark.integration
def test_sockets_of_killed_processes_are_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    killed = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    left = status.socket_directories()[0] / f"{process_name(killed.pid)}-1"
    left.parent.mkdir(mode=0o700)
    left.touch()
    alive = left.with_name(f"{process_name(os.getpid())}-99")
    alive.touch()
    killed.kill()
    killed.communicate()
    door, path = status.bind_socket()
    door.close()
    path.unlink()
    assert list(left.parent.iterdir()) == [alive]
