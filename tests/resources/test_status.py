"""What managers at work tell whoever asks, over real sockets between real processes."""

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
from agentfly.resources.owner import process_name
from agentfly.types import Task

TASK = Task.of("Make it show 7.", "seven")
OTHER_PROCESS = """
import asyncio, sys, time
from agentfly import Environment
from agentfly.resources import ResourceManager
from agentfly.types import Task

class Counter(Environment): ...

async def main():
    async with ResourceManager().leases(Task.of("?", "theirs"), [Counter], chain="3/1") as leases:
        await leases.get(Counter)
        await asyncio.sleep(0.05)
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
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for the sockets of this test; its path must be short."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


@pytest.fixture
def other() -> Iterator[subprocess.Popen[str]]:
    yield from _other("asleep")


@pytest.fixture
def blocked() -> Iterator[subprocess.Popen[str]]:
    yield from _other("blocked")


def _other(how: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", OTHER_PROCESS, how], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


async def told(count: int) -> list[status.Report]:
    """The reports, once so many managers listen."""
    async with asyncio.timeout(20):
        while len(found := await status.reports()) != count:
            await asyncio.sleep(0.01)
    return found


async def test_a_manager_tells_its_figures_and_whose_its_instances_are() -> None:
    manager = ResourceManager()
    async with manager.leases(TASK, [Counter], chain="0/1") as leases:
        await leases.get(Counter)
        [report] = await told(1)
        [figures] = report.figures
        [lease] = figures.leases
        assert (report.pid, report.silence) == (os.getpid(), "")
        assert (figures.environment, figures.place, figures.lent, figures.max_instances) == ("Counter", "here", 1, 2)
        assert (lease.holders[0].chain, lease.holders[0].task) == ("0/1", "seven")
        assert lease.seconds > 0
        assert figures.seconds["start"]["count"] == 1
        assert json.loads(json.dumps(report.to_json()))["figures"][0]["environment"] == "Counter"
    await manager.close()


async def test_why_nothing_can_be_started_is_told() -> None:
    manager = ResourceManager()
    async with manager.leases(TASK, [Broken]) as leases:
        with pytest.raises(EnvironmentFault):
            await leases.get(Broken)
    [report] = await told(1)
    assert "no such disk" in report.figures[0].broken
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
        assert {report.pid for report in await told(3)} == {os.getpid()}
    finally:
        done.set()
        thread.join()
    assert len(await told(2)) == 2
    await first.close()
    await second.close()
    assert await told(0) == []


async def test_nothing_is_left_when_a_loop_ends_without_anybody_closing(runtime: Path) -> None:
    async def forgetful() -> None:
        await ResourceManager().warm_up([Counter])
        await asyncio.sleep(0.01)

    await asyncio.to_thread(asyncio.run, forgetful())
    assert list((runtime / "agentfly").iterdir()) == []


async def test_who_may_be_asked_is_not_kept_alive() -> None:
    manager = ResourceManager()
    await manager.warm_up([Counter])
    await told(1)
    gone = weakref.ref(manager._exchange)
    del manager
    async with asyncio.timeout(20):
        while gone() is not None:
            gc.collect()
            await asyncio.sleep(0.01)
    assert await told(0) == []


async def test_another_process_tells_its_figures_and_dies(other: subprocess.Popen[str], runtime: Path) -> None:
    [report] = await told(1)
    assert report.pid == other.pid
    assert str(report.figures[0].leases[0]).startswith("chain 3/1 (theirs) for ")
    other.send_signal(signal.SIGKILL)
    other.wait()
    assert len(list((runtime / "agentfly").iterdir())) == 1
    assert await status.reports() == []
    assert list((runtime / "agentfly").iterdir()) == []


async def test_a_process_whose_loop_is_blocked(blocked: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "PATIENCE", 0.3)
    [report] = await status.reports()
    assert report.pid == blocked.pid
    assert "does not answer" in report.silence


async def test_a_socket_that_refuses_is_removed(runtime: Path) -> None:
    folder = runtime / "agentfly"
    folder.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(folder / f"{process_name(os.getpid())}-99"))
    assert await status.reports() == []
    assert list(folder.iterdir()) == []


async def test_an_answer_of_another_version_is_no_reason_to_fail(runtime: Path) -> None:
    folder = runtime / "agentfly"
    folder.mkdir(mode=0o700)

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'{"command": "x", "figures": [{"leases": [], "colour": "red"}]}')
        writer.close()

    async with await asyncio.start_unix_server(answer, folder / f"{process_name(os.getpid())}-99"):
        [report] = await status.reports()
    assert "another version" in report.silence


async def test_a_folder_that_others_can_open_is_not_used(
    runtime: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(runtime / "nowhere"))
    (runtime / "agentfly").mkdir()
    (runtime / "agentfly").chmod(0o777)
    with caplog.at_level(logging.DEBUG, status.__name__):
        await _works()
    assert "only this user can open" in caplog.text
    with pytest.raises(ConfigError, match="set XDG_RUNTIME_DIR"):
        await status.reports()


@pytest.mark.parametrize("runtime_folder", ["nowhere", "x" * 120, "file/below"])
async def test_a_run_goes_on_where_nobody_can_be_answered(
    runtime: Path, runtime_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (runtime / "file").touch()
    if len(runtime_folder) > 100:
        (runtime / runtime_folder).mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime / runtime_folder))
    monkeypatch.setattr(tempfile, "tempdir", str(runtime / runtime_folder))
    await _works()
    assert await status.reports() == []


async def test_the_second_folder_is_taken_where_the_first_cannot_be(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime / "nowhere"))
    manager = ResourceManager()
    await manager.warm_up([Counter])
    await told(1)
    assert len(list((runtime / f"agentfly-{os.getuid()}").iterdir())) == 1
    await manager.close()


async def _works() -> None:
    manager = ResourceManager()
    async with manager.leases(TASK, [Counter]) as leases:
        assert isinstance(await leases.get(Counter), Counter)
        await asyncio.sleep(0.01)
    await manager.close()


def test_sockets_of_processes_that_were_killed_are_removed_by_the_next_manager(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    killed = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    left = status.folders()[0] / f"{process_name(killed.pid)}-1"
    left.parent.mkdir(mode=0o700)
    left.touch()
    alive = left.with_name(f"{process_name(os.getpid())}-99")
    alive.touch()
    killed.kill()
    killed.communicate()
    door, path = status._bound()
    door.close()
    path.unlink()
    assert list(left.parent.iterdir()) == [alive]
