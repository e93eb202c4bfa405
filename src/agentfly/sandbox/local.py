"""LocalSandbox: sessions on this machine, cloned from one zygote."""

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
from agentfly.sandbox import channel
from agentfly.sandbox.base import Capabilities, Limits
from agentfly.sandbox.cgroups import Cgroup, Cgroups
from agentfly.sandbox.host import SessionHost
from agentfly.sandbox.mounts import WORK
from agentfly.sandbox.owner import is_leftover, process_name, remove_folder
from agentfly.sandbox.session import Sandbox
from agentfly.sandbox.zygote import LaunchPlan, ZygoteHandle


class LocalSandbox(Sandbox):
    """Sessions of one mechanism, cloned from one zygote, which is restarted if it dies."""

    def __init__(
        self, plan: LaunchPlan, capabilities: Capabilities, cgroups: Cgroups | None, preload: tuple[str, ...]
    ) -> None:
        super().__init__()
        self._plan = plan
        self._capabilities = capabilities
        self._cgroups = cgroups
        self._preload = preload
        self._zygote: ZygoteHandle | None = None
        self._start_lock = asyncio.Lock()

    @property
    def mechanism(self) -> str:
        """Name of the mechanism."""
        return self._plan.mechanism

    @property
    def capabilities(self) -> Capabilities:
        """What the mechanism enforces."""
        return self._capabilities

    @property
    def preloaded_libraries(self) -> tuple[str, ...]:
        """Libraries that are already imported when a session starts."""
        return tuple(self._zygote.preloaded) if self._zygote else ()

    async def start(self) -> ZygoteHandle:
        """Return the zygote, started if it is not running."""
        async with self._start_lock:
            if self._closed:
                raise EnvironmentFault("this sandbox is closed")
            if self._zygote is None or not self._zygote.alive:
                if self._zygote:
                    await self._zygote.close()
                    self._zygote = None
                self._zygote = await ZygoteHandle.start(self._plan, self._preload)
            return self._zygote

    async def _make_host(self, limits: Limits) -> LocalHost:
        zygote = await self.start()
        return LocalHost(self._plan, self._cgroups, zygote, limits=limits, on_closed=self._hosts.discard)

    async def close(self) -> None:
        """Close all sessions and the zygote."""
        await super().close()
        async with self._start_lock:
            if self._zygote:
                await self._zygote.close()


class LocalHost(SessionHost):
    """A session on this machine: a process tree, a channel, a cgroup, and a folder if it has no mounts of its own."""

    def __init__(
        self,
        plan: LaunchPlan,
        cgroups: Cgroups | None,
        zygote: ZygoteHandle,
        limits: Limits,
        on_closed: Callable[[SessionHost], object],
    ) -> None:
        super().__init__(limits, on_closed)
        self._plan = plan
        self._cgroups = cgroups
        self._zygote = zygote
        self._cgroup: Cgroup | None = None
        self._number: int | None = None
        self._temporary_folder: Path | None = None
        self.folder = WORK

    async def open(self) -> None:
        """Clone the session, move it into its cgroup, and only then let it continue."""
        own_mounts = self._plan.own_mounts
        config: dict[str, Any] = {
            **asdict(self.limits),
            "watch": self._cgroups is None and own_mounts,
            # Loopback only where a cgroup limits its buffers: the watchdog cannot see them.
            "inet": own_mounts and self._cgroups is not None and self._cgroups.limits_socket_memory,
        }
        if not own_mounts:
            self._temporary_folder = make_folder(self._plan.uid)
            self.folder = config["work"] = str(self._temporary_folder)
        if self._cgroups:
            self._cgroup = self._cgroups.create(self.limits)
        self._number, self.channel = self._zygote.open(config, credentials=self._cgroup is not None)
        pid = await self.channel.receive_credentials()
        self.channel.allow(1 << 16)
        await self._expect("hello")
        if self._cgroup:
            if pid is None:
                raise channel.ProtocolViolation("the kernel does not report the sender's pid")
            self._cgroup.add(pid)
        await self._wait_until_ready()

    def memory_kills(self) -> int:
        """Number of processes killed by the kernel for memory."""
        return self._cgroup.memory_kills() if self._cgroup else 0

    async def memory(self) -> int | None:
        """Bytes charged to the cgroup."""
        return self._cgroup.memory() if self._cgroup else None

    async def pause(self, paused: bool) -> None:
        """Do nothing: an idle session uses no CPU time, and shares most of its memory."""

    async def _release(self) -> int | None:
        status = None
        if self._number is not None:
            status = await self._zygote.end(self._number)
            self.channel.close()
        if self._cgroup:
            await self._cgroup.remove()
        if self._temporary_folder:
            remove_folder(self._temporary_folder)
        return status


def make_folder(owner: int | None) -> Path:
    """Create a temporary folder for a session without mounts, and remove the folders of processes that are gone."""
    parent = Path(tempfile.gettempdir())
    for old in parent.glob("agentfly-*"):
        if is_leftover(old.name):
            with contextlib.suppress(OSError, EnvironmentFault):  # it may belong to another user
                remove_folder(old)
    folder = Path(tempfile.mkdtemp(prefix=f"{process_name(os.getpid())}-", dir=parent))
    if owner is not None:
        os.chown(folder, owner, owner)
    return folder
