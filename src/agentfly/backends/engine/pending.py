"""Who waits for a job in which event loop, and how what was sampled gets there."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from agentfly.backends.engine.request import EngineRequest
from agentfly.errors import describe
from agentfly.types import Completion

Update = Completion | Exception | list[int]
"""How a turn ended, or what was sampled of it since the last time."""


class PendingRequest:
    """A job, and who waits for it in which event loop."""

    def __init__(self, job: EngineRequest) -> None:
        self.job = job
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Completion] = self.loop.create_future()

    def take(self, news: Update) -> None:
        """In the event loop: pass on what happened. A watcher that raises ends its own turn with what it raised."""
        if self.future.done():
            return
        match news:
            case Completion():
                self.future.set_result(news)
            case Exception():
                self.future.set_exception(news)
            case ids:
                assert self.job.request.on_tokens is not None
                try:
                    self.job.request.on_tokens(ids)
                except KeyboardInterrupt:
                    raise
                except BaseException as error:
                    fits = isinstance(error, Exception) and not isinstance(error, StopIteration)
                    self.future.set_exception(error if fits else RuntimeError(describe(error)))


def dispatch(news: Sequence[tuple[PendingRequest, Update]]) -> None:
    """From the engine's thread: one call into each event loop."""
    for loop in {ticket.loop for ticket, _ in news}:
        mine = [(ticket, what) for ticket, what in news if ticket.loop is loop]
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(_hand_out, mine)


def _hand_out(news: Sequence[tuple[PendingRequest, Update]]) -> None:
    for ticket, what in news:
        ticket.take(what)
