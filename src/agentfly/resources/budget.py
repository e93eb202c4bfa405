"""What all pools together may use, and who gets the next room under it.

Room goes to the environment that somebody waits for and that has fewest instances, so that none starves; among equals
to whoever has waited longest. What an older request waits for is never taken from it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from agentfly.errors import ConfigError
from agentfly.resources.stock import Stock


@dataclass(frozen=True, slots=True)
class Budget:
    """What all pools together may use."""

    instances: int | None = None
    """Most instances at once; None: no limit."""
    memory: int | None = None
    """Bytes, as the pools declare them for an instance; None: no limit."""

    @property
    def unlimited(self) -> bool:
        return self.instances is None and self.memory is None

    def refuse_what_never_fits(self, stocks: Iterable[Stock]) -> None:
        """Raise where one instance of each of these would be too much already."""
        asked = list(stocks)
        names, memory = " and ".join(stock.name for stock in asked), sum(map(_memory, asked))
        if self.instances is not None and len(asked) > self.instances:
            raise ConfigError(f"a chain needs {names}; a budget of {self.instances} instances has no room")
        if self.memory is not None and memory > self.memory:
            raise ConfigError(f"{names} need {memory} bytes; a budget of {self.memory} bytes has no room")

    def fits(self, stock: Stock, stocks: Iterable[Stock]) -> bool:
        """Whether there is room for one more instance of an environment, beside all there are."""
        there = list(stocks)
        if self.instances is not None and sum(each.count for each in there) >= self.instances:
            return False
        used = sum(each.count * _memory(each) for each in there)
        return self.memory is None or used + _memory(stock) <= self.memory

    def spare_for(self, stock: Stock, stocks: Iterable[Stock]) -> Stock | None:
        """A pool with an idle instance that may go to make room for another; None where there is none."""
        demand = stock.head
        if demand is None:
            return None
        for other in stocks:
            kept = other.head is not None and not demand < other.head
            if other is not stock and len(other.idle) > kept:
                return other
        return None

    def owes(self, stock: Stock, stocks: Iterable[Stock]) -> bool:
        """Whether an instance that came back must make room for another environment that has less than its share."""
        if self.unlimited:
            return False
        mine, there = stock.head, list(stocks)
        for other in there:
            theirs = other.head
            if other is stock or theirs is None or other.wanted() <= 0 or self.fits(other, there):
                continue
            if mine is None or stock.count - other.count >= 2 or (other.count == 0 and theirs < mine):
                return True
        return False


def need(stock: Stock) -> tuple[bool, int, int]:
    """Who gets the next room: what somebody waits for, where there are fewest, and where the wait began first."""
    return (stock.head is None, stock.count, stock.head.order if stock.head is not None else 0)


def _memory(stock: Stock) -> int:
    return stock.pool.memory or 0
