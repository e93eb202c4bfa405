"""A sandbox whose sessions live in cells: opens them, and is rid of all of them at the end."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from types import TracebackType
from typing import Self

from agentfly.errors import EnvironmentFault
from agentfly.resources.sandbox import wire
from agentfly.resources.sandbox.cell import Cell
from agentfly.resources.sandbox.contract import Sandbox
from agentfly.resources.sandbox.limits import Limits
from agentfly.resources.sandbox.session import CellSession

OPEN_SECONDS = 60.0


class CellSandbox(Sandbox):
    """Sessions in cells of one kind."""

    def __init__(self) -> None:
        self._cells: set[Cell] = set()
        self._closed = False

    @abstractmethod
    async def _make_cell(self, limits: Limits) -> Cell:
        """A cell that is not open yet, on grounds that hold."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def open_session(self, limits: Limits | None = None) -> CellSession:
        """A fresh session, ready to run."""
        return CellSession(self.open_cell, await self.open_cell(limits or Limits()))

    async def open_cell(self, limits: Limits) -> Cell:
        """A fresh cell, its keeper ready."""
        if self._closed:
            raise EnvironmentFault("this sandbox is closed")
        cell = await self._make_cell(limits)
        self._cells.add(cell)
        try:
            async with asyncio.timeout(OPEN_SECONDS):
                await cell.open()
        except BaseException as error:
            ending = cell.end()
            if isinstance(error, Exception):  # whoever is cancelled does not wait
                await asyncio.wait([ending])
            if isinstance(error, wire.WireError | TimeoutError | OSError):
                why = str(error) or type(error).__name__
                raise EnvironmentFault(f"a session of the {self.mechanism} sandbox did not start: {why}") from error
            raise
        return cell

    async def close(self) -> None:
        """End every session."""
        self._closed = True
        endings = [cell.over() for cell in list(self._cells)]
        for failure in await asyncio.gather(*endings, return_exceptions=True):
            if isinstance(failure, BaseException):
                raise failure
