"""Environment instances: one a chain, and every one of them closed, however the chain ended."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from typing import Any, ClassVar

import pytest

from agentfly import Environment, Task
from agentfly.errors import EnvironmentFault
from agentfly.resources import ResourceManager

TASK = Task.of("Q")


class World(Environment):
    """Writes down what was done to it; a method named in `breaks` fails, one in `hangs` never ends."""

    log: ClassVar[list[str]] = []
    breaks: ClassVar[set[str]] = set()
    hangs: ClassVar[set[str]] = set()
    start_timeout = reset_timeout = 0.05

    async def _do(self, what: str) -> None:
        self.log.append(what)
        if what in self.breaks:
            raise OSError(f"{what} broke")
        if what in self.hangs:
            await asyncio.sleep(60)

    async def start(self) -> None:
        await self._do("start")

    async def reset(self, task: Task) -> None:
        self.task = task
        await self._do("reset")

    async def close(self) -> None:
        await asyncio.sleep(0)
        await self._do("close")


class Second(World):
    pass


@pytest.fixture(autouse=True)
async def _clean() -> AsyncIterator[None]:
    World.log.clear()
    World.breaks.clear()
    World.hangs.clear()
    yield
    left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task() and "close" in repr(task)]
    assert left == []


@pytest.fixture
def manager() -> ResourceManager:
    return ResourceManager()


async def test_a_chain_has_one_instance_of_a_kind_and_two_chains_have_two(manager: ResourceManager) -> None:
    async with manager.leases(TASK) as leases, manager.leases(TASK) as others:
        first, again, also = await asyncio.gather(leases.get(World), leases.get(World), leases.get(World))
        assert first is again is also
        assert first.task is TASK
        assert await others.get(World) is not first
        assert await leases.get(Second) is not first
        assert manager.live == 3
        assert World.log == ["start", "reset"] * 3
    assert manager.live == 0
    assert World.log.count("close") == 3


async def test_nothing_is_made_that_nobody_asks_for(manager: ResourceManager) -> None:
    async with manager.leases(TASK):
        pass
    assert World.log == []


async def failing_chain(manager: ResourceManager) -> None:
    async with manager.leases(TASK) as leases:
        await leases.get(World)
        raise ZeroDivisionError


async def test_an_error_in_the_chain_releases_and_goes_through(manager: ResourceManager) -> None:
    with pytest.raises(ZeroDivisionError):
        await failing_chain(manager)
    assert (manager.live, World.log[-1]) == (0, "close")


@pytest.mark.parametrize("times", [1, 2, 3])
async def test_a_cancelled_chain_closes_its_environment_however_often_it_is_cancelled(
    manager: ResourceManager, times: int
) -> None:
    held, closing, go_on, closed = asyncio.Event(), asyncio.Event(), asyncio.Event(), []

    class Slow(Environment):
        async def close(self) -> None:
            closing.set()
            await go_on.wait()
            closed.append(self)

    async def chain() -> None:
        async with manager.leases(TASK) as leases:
            await leases.get(Slow)
            held.set()
            await asyncio.sleep(60)

    task = asyncio.create_task(chain())
    await held.wait()
    for _ in range(times):
        task.cancel()
        await closing.wait()
        await asyncio.sleep(0)
    assert not task.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (len(closed), manager.live) == (1, 0)


@pytest.mark.parametrize("method", ["start", "reset"])
async def test_an_environment_that_cannot_be_made_ready_is_a_fault_and_is_closed(
    manager: ResourceManager, method: str
) -> None:
    World.breaks.add(method)
    async with manager.leases(TASK) as leases:
        with pytest.raises(EnvironmentFault, match=rf"World\.{method} failed: OSError: {method} broke"):
            await leases.get(World)
        assert (World.log[-1], manager.live) == ("close", 0)
        World.breaks.clear()
        assert isinstance(await leases.get(World), World)
    assert World.log.count("close") == 2


@pytest.mark.parametrize("method", ["start", "reset"])
async def test_an_environment_that_hangs_is_a_fault_and_is_closed(manager: ResourceManager, method: str) -> None:
    World.hangs.add(method)
    async with manager.leases(TASK) as leases:
        with pytest.raises(EnvironmentFault, match=rf"World\.{method} took longer than 0\.05 s"):
            await leases.get(World)
    assert (World.log[-1], manager.live) == ("close", 0)


async def test_what_broke_first_is_what_is_raised(manager: ResourceManager, caplog: pytest.LogCaptureFixture) -> None:
    World.breaks.update({"start", "close"})
    with pytest.raises(EnvironmentFault, match="start broke"):
        await manager.start(World, TASK)
    assert "close broke" in caplog.text
    assert manager.live == 0


async def test_a_chain_cancelled_while_its_environment_starts_closes_it(
    manager: ResourceManager, caplog: pytest.LogCaptureFixture
) -> None:
    class Slow(World):
        start_timeout = 60.0

    World.hangs.add("start")
    World.breaks.add("close")
    async with manager.leases(TASK) as leases:
        task = asyncio.create_task(leases.get(Slow))
        while "start" not in World.log:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert (World.log, manager.live) == (["start", "close"], 0)
    assert "close broke" in caplog.text


async def test_a_failing_close_is_told_once_all_is_back(manager: ResourceManager) -> None:
    World.breaks.add("close")
    leases = manager.leases(TASK)
    await leases.get(World)
    await leases.get(Second)
    with pytest.raises(EnvironmentFault, match="close broke"):
        await leases.release()
    assert (manager.live, World.log.count("close")) == (0, 2)
    await leases.release()
    assert World.log.count("close") == 2


async def test_a_failing_close_does_not_hide_the_chains_own_error(
    manager: ResourceManager, caplog: pytest.LogCaptureFixture
) -> None:
    World.breaks.add("close")
    with caplog.at_level(logging.WARNING), pytest.raises(ZeroDivisionError):
        await failing_chain(manager)
    assert "close broke" in caplog.text
    assert manager.live == 0


async def test_a_close_that_hangs_is_given_up(manager: ResourceManager) -> None:
    World.hangs.add("close")
    with pytest.raises(EnvironmentFault, match=r"World\.close took longer than 0\.05 s"):
        async with manager.leases(TASK) as leases:
            await leases.get(World)
    assert manager.live == 0


async def test_a_time_out_of_the_environments_own_is_told_as_it_is(manager: ResourceManager) -> None:
    class Remote(Environment):
        async def start(self) -> None:
            raise TimeoutError("no answer from port 7")

    with pytest.raises(EnvironmentFault, match=r"Remote\.start failed: TimeoutError: no answer from port 7"):
        await manager.start(Remote, TASK)


async def test_a_constructor_that_fails_is_a_fault(manager: ResourceManager) -> None:
    class Needy(Environment):
        def __init__(self, size: int) -> None:
            self.size = size

    with pytest.raises(EnvironmentFault, match=r"Needy\(\) failed: TypeError"):
        await manager.start(Needy, TASK)
    assert manager.live == 0


async def test_plain_methods_run_in_threads(manager: ResourceManager) -> None:
    where: list[str] = []

    class Plain(Environment):
        def start(self) -> None:  # type: ignore[override]
            where.append(threading.current_thread().name)

        def reset(self, task: Task) -> None:  # type: ignore[override]
            where.append(task.question)

        def close(self) -> Any:
            where.append("closed")

    async with manager.leases(TASK) as leases:
        await leases.get(Plain)
    assert where[1:] == ["Q", "closed"]
    assert where[0] != threading.main_thread().name


async def test_a_fault_the_environment_names_itself_goes_through(manager: ResourceManager) -> None:
    class Honest(Environment):
        async def reset(self, task: Task) -> None:
            raise EnvironmentFault("the disk is full")

    with pytest.raises(EnvironmentFault, match=r"^the disk is full$"):
        await manager.start(Honest, TASK)
