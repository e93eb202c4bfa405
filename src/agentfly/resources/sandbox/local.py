"""A sandbox on this machine: one zygote, and for each session a cell that holds all it must be rid of again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from agentfly.errors import EnvironmentFault
from agentfly.resources.owner import is_leftover, process_name, remove_folder
from agentfly.resources.sandbox import wire
from agentfly.resources.sandbox.cell import Cell
from agentfly.resources.sandbox.cells import CellSandbox
from agentfly.resources.sandbox.cgroups import Cgroups, Group
from agentfly.resources.sandbox.contract import Capabilities
from agentfly.resources.sandbox.limits import Limits
from agentfly.resources.sandbox.view import WORK
from agentfly.resources.sandbox.zygote import Plan, Zygote


class LocalSandbox(CellSandbox):
    """Sessions of one mechanism, cloned from one zygote, which is started again should it die."""

    def __init__(
        self, plan: Plan, capabilities: Capabilities, cgroups: Cgroups | None, preload: tuple[str, ...]
    ) -> None:
        super().__init__()
        self._plan = plan
        self._capabilities = capabilities
        self._cgroups = cgroups
        self._preload = preload
        self._zygote: Zygote | None = None
        self._starting = asyncio.Lock()

    @property
    def mechanism(self) -> str:
        """How sessions are confined."""
        return self._plan.mechanism

    @property
    def capabilities(self) -> Capabilities:
        """What is enforced, and how."""
        return self._capabilities

    @property
    def preloaded(self) -> tuple[str, ...]:
        """The libraries every session starts with."""
        return tuple(self._zygote.preloaded) if self._zygote else ()

    async def start(self) -> Zygote:
        """The zygote, started if it is not running."""
        async with self._starting:
            if self._closed:
                raise EnvironmentFault("this sandbox is closed")
            if self._zygote is None or not self._zygote.alive:
                if self._zygote:
                    await self._zygote.close()
                    self._zygote = None
                self._zygote = await Zygote.start(self._plan, self._preload)
            return self._zygote

    async def _make_cell(self, limits: Limits) -> LocalCell:
        return LocalCell(self._plan, self._cgroups, await self.start(), limits, self._cells.discard)

    async def close(self) -> None:
        """End every session and the zygote."""
        await super().close()
        async with self._starting:
            if self._zygote:
                await self._zygote.close()


class LocalCell(Cell):
    """What one session holds on this machine: a process tree, a wire, a control group, perhaps a folder."""

    def __init__(
        self,
        plan: Plan,
        cgroups: Cgroups | None,
        zygote: Zygote,
        limits: Limits,
        forget: Callable[[Cell], object],
    ) -> None:
        super().__init__(limits, forget)
        self._plan, self._cgroups, self._zygote = plan, cgroups, zygote
        self._group: Group | None = None
        self._number: int | None = None
        self._folder: Path | None = None
        self.folder = WORK

    async def open(self) -> None:
        """Clone, put the tree under its caps, and only then let it go on."""
        own_files = self._plan.own_files
        told: dict[str, Any] = {
            **asdict(self.limits),
            "watch": self._cgroups is None and own_files,
            # Loopback only where a control group limits its buffers: the watchdog cannot see them.
            "inet": own_files and self._cgroups is not None and self._cgroups.limits_socket_memory,
        }
        if not own_files:
            self._folder = make_folder(self._plan.uid)
            self.folder = told["work"] = str(self._folder)
        if self._cgroups:
            self._group = self._cgroups.make(self.limits)
        self._number, self.wire = self._zygote.open(told, credentials=self._group is not None)
        pid = await self.wire.hello()
        self.wire.allow(1 << 16)
        await self._expect("hello")
        if self._group:
            if pid is None:
                raise wire.WireBroken("the kernel does not tell who speaks")
            self._group.admit(pid)
        await self._begin()

    def memory_kills(self) -> int:
        """How many processes the kernel has killed for memory."""
        return self._group.kills() if self._group else 0

    async def memory(self) -> int | None:
        """Bytes that its control group counts."""
        return self._group.usage() if self._group else None

    async def pause(self, paused: bool) -> None:
        """Nothing to do: a session that waits for a call uses no processor, and shares most of its memory."""

    async def _end(self) -> int | None:
        status = None
        if self._number is not None:
            status = await self._zygote.end(self._number)
            self.wire.close()
        if self._group:
            await self._group.remove()
        if self._folder:
            remove_folder(self._folder)
        return status


def make_folder(owner: int | None) -> Path:
    """A folder for one session that has no file system of its own, after removing those of processes that are gone."""
    parent = Path(tempfile.gettempdir())
    for old in parent.glob("agentfly-*"):
        if is_leftover(old.name):
            with contextlib.suppress(OSError, EnvironmentFault):  # it may be another user's
                remove_folder(old)
    folder = Path(tempfile.mkdtemp(prefix=f"{process_name(os.getpid())}-", dir=parent))
    if owner is not None:
        os.chown(folder, owner, owner)
    return folder
