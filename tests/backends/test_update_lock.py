"""The gate between turns and updates, from one event loop and from several."""

import asyncio
import threading

import pytest

from agentfly.backends.update_lock import UpdateLock


async def test_an_update_waits_for_turns_and_holds_back_those_that_come() -> None:
    gate, said, end = UpdateLock(), [], asyncio.Event()

    async def turn(name: str, wait: bool = False) -> None:
        async with gate.turn():
            said.append(name)
            if wait:
                await end.wait()

    async def update(name: str) -> None:
        async with gate.update():
            said.append(name)
            await asyncio.sleep(0.02)
            said.append(f"{name} over")

    first = asyncio.create_task(turn("first", wait=True))
    await asyncio.sleep(0)
    updates = [asyncio.create_task(update(name)) for name in ("update", "another")]
    await asyncio.sleep(0.03)
    assert said == ["first"]
    held = asyncio.create_task(turn("held"))
    await asyncio.sleep(0.03)
    assert said == ["first"]
    end.set()
    await asyncio.gather(first, held, *updates)
    assert said[:3] == ["first", "update", "update over"]
    assert sorted(said[3:]) == ["another", "another over", "held"]


async def test_whoever_gives_up_leaves_the_gate_open() -> None:
    gate = UpdateLock()
    async with gate.turn():
        update = asyncio.create_task(gate.update().__aenter__())
        await asyncio.sleep(0.02)
        update.cancel()
        with pytest.raises(asyncio.CancelledError):
            await update
    with pytest.raises(KeyError):
        async with gate.update():
            raise KeyError
    async with asyncio.timeout(5), gate.turn():
        pass


async def test_loops_in_other_threads_are_waited_for() -> None:
    gate, inside, end = UpdateLock(), threading.Event(), threading.Event()

    async def turn() -> None:
        async with gate.turn():
            inside.set()
            await asyncio.to_thread(end.wait)

    thread = threading.Thread(target=lambda: asyncio.run(turn()))
    thread.start()
    await asyncio.to_thread(inside.wait)
    update = asyncio.create_task(gate.update().__aenter__())
    await asyncio.sleep(0.05)
    assert not update.done()
    end.set()
    async with asyncio.timeout(10):
        await update
    thread.join()
