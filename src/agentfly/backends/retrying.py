"""Retries with backoff (tenacity) and rate limits (pyrate-limiter) of requests to other services.

attempts = AsyncRetrying(retry=…, wait=WaitAsAsked(backoff=0.5), stop=stop_after_attempt(5), …)
answer = await attempts(send, request)
"""

from __future__ import annotations

import random
import time
from email.utils import parsedate_to_datetime

from tenacity import RetryCallState, wait_exponential
from tenacity.wait import wait_base

from agentfly.validation import PositiveFloat, PositiveInt, validate_arguments


class WaitAsAsked(wait_base):
    """Waits as long as the server asked for (attribute `wait` of the exception, in seconds, or None), else backs off.

    backoff: seconds after the first attempt, doubled after each further one up to `max_backoff`. jitter: relative
    deviation of a backoff. max_asked: limit of what the server asks for.
    """

    def __init__(
        self, backoff: float, *, max_backoff: float = 30.0, jitter: float = 0.0, max_asked: float = float("inf")
    ) -> None:
        self._backoff = wait_exponential(multiplier=backoff, max=max_backoff)
        self._jitter = jitter
        self._max_asked = max_asked

    def __call__(self, retry_state: RetryCallState) -> float:
        """Seconds before the next attempt."""
        error = retry_state.outcome.exception() if retry_state.outcome is not None else None
        requested: float | None = getattr(error, "wait", None)
        if requested is not None:
            return min(requested, self._max_asked)
        return self._backoff(retry_state) * random.uniform(1 - self._jitter, 1 + self._jitter)


def parse_retry_after(value: str) -> float | None:
    """Seconds that a Retry-After header asks for, as a number or a date; None if it is neither."""
    try:
        return max(0.0, float(value.strip()))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None


class RateLimiter:
    """Admits at most `limit` acquisitions in any period of `seconds`, over all threads and event loops."""

    @validate_arguments
    def __init__(self, limit: PositiveInt, seconds: PositiveFloat) -> None:
        from pyrate_limiter import InMemoryBucket, Limiter, Rate, SingleBucketFactory  # 200 modules, seldom needed

        self._bucket = InMemoryBucket([Rate(limit, max(1, round(seconds * 1000)))])
        # Without the library's thread that drops old acquisitions: `_drop_old` does it.
        self._limiter = Limiter(SingleBucketFactory(self._bucket, schedule_leak=False), buffer_ms=0)

    async def acquire(self) -> None:
        """Wait until one more acquisition is admitted; in an event loop, in the order of the calls."""
        self._drop_old()
        await self._limiter.try_acquire_async()

    def acquire_blocking(self) -> None:
        """Block the thread until one more acquisition is admitted."""
        self._drop_old()
        self._limiter.try_acquire()

    def _drop_old(self) -> None:
        self._bucket.leak(self._bucket.now())  # type: ignore[no-untyped-call]
