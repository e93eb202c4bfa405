"""The lock between turns and weight updates, in one event loop and in several."""

import asyncio
import threading

import pytest

from agentfly.backends.event_loops import UpdateLock


async def test_update_waits_for_running_turns_and_blocks_new_ones() -> None:
    lock, events, end = UpdateLock(), [], asyncio.Event()

    async def turn(name: str, wait: bool = False) -> None:
        async with lock.turn():
            events.append(name)
            if wait:
                await end.wait()

    async def update(name: str) -> None:
        async with lock.update():
            events.append(name)
            await asyncio.sleep(0.02)
            events.append(f"{name} over")

    first = asyncio.create_task(turn("first", wait=True))
    await asyncio.sleep(0)
    updates = [asyncio.create_task(update(name)) for name in ("update", "another")]
    await asyncio.sleep(0.03)
    assert events == ["first"]
    held = asyncio.create_task(turn("held"))
    await asyncio.sleep(0.03)
    assert events == ["first"]
    end.set()
    await asyncio.gather(first, held, *updates)
    assert events[:3] == ["first", "update", "update over"]
    assert sorted(events[3:]) == ["another", "another over", "held"]


async def test_cancellation_and_exceptions_release_the_lock() -> None:
    lock = UpdateLock()
    async with lock.turn():
        update = asyncio.create_task(lock.update().__aenter__())
        await asyncio.sleep(0.02)
        update.cancel()
        with pytest.raises(asyncio.CancelledError):
            await update
    with pytest.raises(KeyError):
        async with lock.update():
            raise KeyError
    async with asyncio.timeout(60), lock.turn():
        pass


async def test_update_waits_for_turns_of_other_event_loops() -> None:
    lock, inside, end = UpdateLock(), threading.Event(), threading.Event()

    async def turn() -> None:
        async with lock.turn():
            inside.set()
            await asyncio.to_thread(end.wait)

    thread = threading.Thread(target=lambda: asyncio.run(turn()))
    thread.start()
    await asyncio.to_thread(inside.wait)
    update = asyncio.create_task(lock.update().__aenter__())
    await asyncio.sleep(0.05)
    assert not update.done()
    end.set()
    async with asyncio.timeout(60):
        await update
    thread.join()
