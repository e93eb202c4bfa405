"""Plain functions in threads: parallel, in order, cancellable, and never blocking the exit of the process."""

import asyncio
import contextvars
import ctypes
import gc
import subprocess
import sys
import threading
import weakref
from importlib.util import find_spec
from typing import Any

import pytest

from agentfly import threads
from agentfly.threads import call, run_within

needs_torch = pytest.mark.skipif(
    find_spec("torch") is None, reason="torch is not installed: pip install 'agentfly-rl[train]'"
)
MARK: contextvars.ContextVar[str] = contextvars.ContextVar("mark", default="none")


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A pool of two threads."""
    small = threads._ThreadPool(2)
    monkeypatch.setattr(threads, "_POOL", small)
    return small


def said_by(program: str) -> str:
    """What a Python process of its own prints, that must end well and without complaint."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


async def wait_until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


async def test_plain_function_does_not_block_the_loop() -> None:
    entered, leave = threading.Event(), threading.Event()

    def block() -> str:
        entered.set()
        assert leave.wait(60)
        return threading.current_thread().name

    running = asyncio.create_task(call(block))
    await wait_until(entered.is_set)  # the loop turns while the function blocks
    leave.set()
    assert await running != threading.main_thread().name


async def test_plain_functions_run_at_the_same_time() -> None:
    together = threading.Barrier(8, timeout=60)
    assert sorted(await asyncio.gather(*(call(together.wait) for _ in range(8)))) == list(range(8))


async def test_a_coroutine_runs_in_the_loop_and_a_returned_awaitable_is_awaited() -> None:
    async def where(a: int, *, function: int) -> tuple[str, int]:
        await asyncio.sleep(0)
        return threading.current_thread().name, a + function

    class Callable:
        async def __call__(self, a: int, *, function: int) -> tuple[str, int]:
            return await where(a, function=function)

    main = threading.current_thread().name
    for function in (where, Callable(), lambda a, *, function: where(a, function=function)):
        assert await call(function, 1, function=2) == (main, 3)


async def test_context_variables_are_copied() -> None:
    def swap() -> str:
        before = MARK.get()
        MARK.set("changed in the thread")
        return before

    MARK.set("of the caller")
    assert await asyncio.gather(call(swap), call(swap)) == ["of the caller"] * 2
    assert MARK.get() == "of the caller"


async def test_thread_limit_queues_further_calls(pool: Any) -> None:
    running, peak, order = 0, 0, []
    lock, gate = threading.Lock(), threading.Event()

    def work(number: int) -> int:
        nonlocal running, peak
        with lock:
            running += 1
            peak = max(peak, running)
            order.append(number)
        assert gate.wait(60)
        with lock:
            running -= 1
        return number

    jobs = [asyncio.create_task(call(work, n)) for n in range(9)]
    await wait_until(lambda: running == 2)
    gate.set()
    assert await asyncio.gather(*jobs) == list(range(9))
    assert (peak, sorted(order)) == (2, list(range(9)))
    assert set(order[:2]) == {0, 1}


async def test_idle_threads_are_reused(pool: Any) -> None:
    seen = set()
    for _ in range(20):
        seen.add(await call(threading.get_ident))
        await wait_until(lambda: pool._idle == pool._threads)
    assert len(seen) == 1


async def test_abandoned_functions_do_not_occupy_the_pool(pool: Any) -> None:
    entered, leave = threading.Semaphore(0), threading.Event()

    def hang() -> None:
        entered.release()
        assert leave.wait(60)

    hung = [asyncio.create_task(call(hang)) for _ in range(2)]
    waiting = asyncio.create_task(call(lambda: "served"))
    for _ in range(2):
        await wait_until(lambda: entered.acquire(blocking=False))
    assert not waiting.done()
    for task in hung:
        task.cancel()
    assert await asyncio.wait_for(waiting, 60) == "served"
    assert await asyncio.wait_for(call(lambda: "also served"), 60) == "also served"
    leave.set()
    assert pool._threads <= 2


async def test_a_call_cancelled_in_the_queue_is_never_run(pool: Any) -> None:
    leave, ran = threading.Event(), []
    busy = [asyncio.create_task(call(leave.wait, 60)) for _ in range(2)]
    await asyncio.sleep(0)
    queued = asyncio.create_task(call(ran.append, 1))
    await asyncio.sleep(0)
    queued.cancel()
    with pytest.raises(asyncio.CancelledError):
        await queued
    leave.set()
    await asyncio.gather(*busy)
    assert await call(lambda: "next") == "next"
    assert ran == []


async def test_exception_of_an_abandoned_function_is_ignored() -> None:
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    entered, leave, left = threading.Event(), threading.Event(), threading.Event()

    def fail() -> None:
        entered.set()
        leave.wait(60)
        left.set()
        raise ValueError("too late")

    task = asyncio.create_task(call(fail))
    await wait_until(entered.is_set)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    leave.set()
    await wait_until(left.is_set)
    await asyncio.sleep(0.02)
    gc.collect()
    assert complaints == []


class Panic(BaseException):
    """As compiled libraries raise it."""


def raising(error: BaseException) -> Any:
    def plain() -> None:
        raise error

    return plain


def raising_async(error: BaseException) -> Any:
    async def coroutine() -> None:
        raise error

    return coroutine


@pytest.mark.parametrize("make", [raising, raising_async])
@pytest.mark.parametrize(
    "error",
    [SystemExit(3), Panic("lost"), StopIteration("x"), asyncio.CancelledError("own"), GeneratorExit()],
    ids=repr,
)
async def test_base_exception_is_raised_as_runtime_error(make: Any, error: BaseException) -> None:
    with pytest.raises(RuntimeError):
        await call(make(error))
    assert await call(lambda: "goes on") == "goes on"


async def test_exception_is_raised_unchanged() -> None:
    with pytest.raises(KeyError, match="lost"):
        await call(raising(KeyError("lost")))
    with pytest.raises(KeyError, match="lost"):
        await call(raising_async(KeyError("lost")))


async def test_cancellation_of_the_caller_propagates() -> None:
    started, leave = threading.Event(), threading.Event()

    async def wait_in_the_loop() -> None:
        started.set()
        await asyncio.sleep(60)

    def wait_in_a_thread() -> None:
        started.set()
        leave.wait(60)

    for function in (wait_in_the_loop, wait_in_a_thread):
        started.clear()
        task = asyncio.create_task(call(function))
        await wait_until(started.is_set)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task.cancelled()
    leave.set()


async def test_idle_thread_releases_its_last_arguments() -> None:
    class Big:
        pass

    big = Big()
    gone = weakref.ref(big)
    await call(lambda value: None, big)
    del big
    await wait_until(lambda: gc.collect() is not None and gone() is None)


def test_several_loops_one_after_another() -> None:
    async def main() -> int:
        return sum(await asyncio.gather(*(call(lambda n=n: n) for n in range(5))))

    assert [asyncio.run(main()) for _ in range(3)] == [10, 10, 10]


def test_a_function_may_outlive_its_loop() -> None:
    leave, left = threading.Event(), threading.Event()

    def late() -> None:
        leave.wait(60)
        left.set()

    async def main() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(call(late), 0.02)

    asyncio.run(main())
    leave.set()
    assert left.wait(60)
    assert asyncio.run(call(lambda: "still there")) == "still there"


@pytest.mark.integration
def test_hung_function_does_not_block_process_exit() -> None:
    program = """
import asyncio, time
from agentfly.threads import call, run_within
async def main():
    try:
        await asyncio.wait_for(call(time.sleep, 3600), 0.1)
    except TimeoutError:
        print("given up", flush=True)
asyncio.run(main())
"""
    assert said_by(program) == "given up\n"


@needs_torch
def test_compute_releases_openmp_helpers() -> None:
    program = """
import asyncio, os, time, torch
from agentfly.threads import compute
torch.set_num_threads(4)
def work():
    torch.ones(1 << 20).exp()
    return len(os.listdir("/proc/self/task"))
async def main():
    during = await compute(work)
    for _ in range(1000):  # the kernel lists a thread for a moment after its end
        ended = during - len(os.listdir("/proc/self/task"))
        if ended >= 3:
            break
        time.sleep(0.01)
    print(ended, flush=True)
asyncio.run(main())
"""
    assert said_by(program) == "3\n"


@needs_torch
def test_fork_does_not_wait_for_openmp_helpers() -> None:
    program = """
import os, torch
from agentfly.threads import release_helpers
torch.set_num_threads(3)
torch.ones(1 << 20).exp()
child = os.fork()
if not child:
    release_helpers()
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
    assert said_by(program) == "7\n"


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="only glibc has malloc_trim")
@pytest.mark.integration
def test_freed_memory_of_threads_returns_to_the_system() -> None:
    program = """
import ctypes, threading
from pathlib import Path
from agentfly.threads import trim_heap
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
def work():
    blocks = [libc.malloc(100_000) for _ in range(1000)]
    for block in blocks:
        ctypes.memset(block, 1, 100_000)
    for block in blocks[:-1]:  # the last one keeps the heap's end in use
        libc.free(ctypes.c_void_p(block))
thread = threading.Thread(target=work)
thread.start()
thread.join()
before = resident()
trim_heap()
print(before - resident() > 50_000_000, flush=True)
"""
    assert said_by(program) == "True\n"


class TestRunWithin:
    async def test_coroutine_that_does_not_suspend_sets_no_timer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def add(a: int, b: int) -> int:
            return a + b

        async def fail() -> None:
            raise KeyError("x")

        monkeypatch.setattr(asyncio.get_running_loop(), "call_at", None)
        limit = asyncio.timeout(60)
        assert await run_within(limit, add(1, 2)) == 3
        with pytest.raises(KeyError):
            await run_within(asyncio.timeout(60), fail())
        assert not limit.expired()

    async def test_coroutine_that_suspends_returns_its_value_or_raises(self) -> None:
        async def wait(future: asyncio.Future[int]) -> int:
            await asyncio.sleep(0)
            return await future

        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in range(2)]
        loop.call_soon(futures[0].set_result, 7)
        loop.call_soon(futures[1].set_exception, KeyError("x"))
        assert await run_within(asyncio.timeout(None), wait(futures[0])) == 7
        with pytest.raises(KeyError):
            await run_within(asyncio.timeout(60), wait(futures[1]))

    @pytest.mark.parametrize("handles", ["nothing", "by awaiting", "by returning"])
    async def test_limit_cancels_the_coroutine(self, handles: str) -> None:
        events: list[str] = []

        async def hang() -> str:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                events.append("cancelled")
                if handles == "nothing":
                    raise
                if handles == "by awaiting":
                    await asyncio.sleep(0)
                    events.append("awaited")
            return "late"

        limit = asyncio.timeout(0.001)
        if handles == "nothing":
            with pytest.raises(TimeoutError):
                await run_within(limit, hang())
        else:
            assert await run_within(limit, hang()) == "late"
        assert limit.expired()
        assert events == ["cancelled", "awaited"][: 2 if handles == "by awaiting" else 1]

    async def test_time_before_the_first_suspension_counts(self) -> None:
        async def wait() -> None:
            await asyncio.Event().wait()

        with pytest.raises(TimeoutError):
            await run_within(asyncio.timeout(-1), wait())

    async def test_cancelling_the_task_cancels_the_coroutine(self) -> None:
        waiting = asyncio.Event()
        cancelled: list[str] = []

        async def hang() -> None:
            waiting.set()
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.append("hang")

        task = asyncio.create_task(run_within(asyncio.timeout(60), hang()))
        await waiting.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert cancelled == ["hang"]
