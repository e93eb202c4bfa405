"""Waiting times, Retry-After headers and rate limits."""

from __future__ import annotations

import asyncio
import threading
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from tenacity import Retrying, stop_after_attempt

from agentfly.backends.retrying import RateLimiter, WaitAsAsked, parse_retry_after
from agentfly.errors import ConfigError


class Busy(Exception):
    def __init__(self, wait: float | None = None) -> None:
        self.wait = wait


def waits(wait: WaitAsAsked, error: Exception, attempts: int) -> list[float]:
    slept: list[float] = []
    retrying = Retrying(wait=wait, stop=stop_after_attempt(attempts), sleep=slept.append, reraise=True)

    def fail() -> None:
        raise error

    with pytest.raises(type(error)):
        retrying(fail)
    return slept


def test_backoff_doubles_up_to_its_limit() -> None:
    assert waits(WaitAsAsked(0.5, max_backoff=3.0), Busy(), 6) == [0.5, 1.0, 2.0, 3.0, 3.0]
    jittered = waits(WaitAsAsked(1.0, max_backoff=1.0, jitter=0.25), ValueError(), 50)
    assert min(jittered) >= 0.75
    assert max(jittered) <= 1.25
    assert len(set(jittered)) > 1


def test_wait_that_the_server_asks_for_replaces_the_backoff() -> None:
    assert waits(WaitAsAsked(60.0), Busy(0.25), 3) == [0.25, 0.25]
    assert waits(WaitAsAsked(60.0, max_asked=2.0), Busy(9.0), 2) == [2.0]


def test_retry_after_is_a_number_or_a_date() -> None:
    assert parse_retry_after(" 1.5 ") == 1.5
    assert parse_retry_after("-3") == 0.0
    later = parse_retry_after(format_datetime(datetime.now(UTC) + timedelta(seconds=60), usegmt=True))
    assert later is not None
    assert 50 < later <= 60
    assert parse_retry_after("soon") is None
    assert parse_retry_after("") is None


# A busy machine makes every wait longer: the tests compare with lower limits, or with waits that are minutes too long.


async def test_rate_limit_holds_over_any_period() -> None:
    limiter = RateLimiter(3, seconds=0.3)
    began = time.monotonic()
    await limiter.acquire()
    await asyncio.sleep(0.2)
    later = time.monotonic()
    for _ in range(3):
        await limiter.acquire()
    assert time.monotonic() - began > 0.29  # the fourth acquisition waits for the first
    await limiter.acquire()
    assert time.monotonic() - later > 0.29  # the fifth for the second, not for the end of a fixed period


async def test_acquisitions_below_the_limit_do_not_wait() -> None:
    limiter = RateLimiter(3, seconds=600)
    await asyncio.wait_for(asyncio.gather(*(limiter.acquire() for _ in range(3))), 60)


async def test_cancelled_wait_uses_no_slot() -> None:
    limiter = RateLimiter(1, seconds=0.3)
    await limiter.acquire()
    waiting = [asyncio.create_task(limiter.acquire()) for _ in range(400)]
    await asyncio.sleep(0)
    for acquisition in waiting:
        acquisition.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await asyncio.wait_for(limiter.acquire(), 60)  # 400 slots would take two minutes


def test_rate_limit_holds_over_threads_and_event_loops() -> None:
    limiter = RateLimiter(2, seconds=0.2)
    times: list[float] = []

    def blocking() -> None:
        limiter.acquire_blocking()
        times.append(time.monotonic())

    async def in_loop() -> None:
        await limiter.acquire()
        times.append(time.monotonic())

    threads = [threading.Thread(target=blocking) for _ in range(3)]
    threads += [threading.Thread(target=asyncio.run, args=(in_loop(),)) for _ in range(3)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    times.sort()
    assert times[2] - began > 0.19
    assert times[4] - began > 0.39


def test_rate_of_nothing_is_rejected() -> None:
    with pytest.raises(ConfigError, match="limit must be a whole number of at least 1, not 0"):
        RateLimiter(0, seconds=60)
