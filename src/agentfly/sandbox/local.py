"""LocalSandbox: sessions on this machine, cloned from one zygote, some of them ahead of need."""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from agentfly import threads
from agentfly.errors import AgentFlyError, EnvironmentFault
from agentfly.sandbox import channel
from agentfly.sandbox.base import Capabilities, Limits
from agentfly.sandbox.cgroups import Cgroup, Cgroups
from agentfly.sandbox.host import SessionHost
from agentfly.sandbox.mounts import WORK
from agentfly.sandbox.owner import process_name, remove_folder, remove_leftover_folders
from agentfly.sandbox.session import Sandbox
from agentfly.sandbox.zygote import LaunchPlan, ZygoteHandle

_MAX_READY_LIMITS = 4
"""Number of different `Limits` that sessions are kept ready for."""
_LOG = logging.getLogger(__name__)


@dataclass
class _ReadySessions:
    """Sessions with the same limits that are forked ahead."""

    hosts: deque[SessionHost] = field(default_factory=deque)
    """Ready for calls, and never used."""
    num_forking: int = 0
    num_opened: int = 0
    """Number of sessions that callers have opened with these limits."""


class LocalSandbox(Sandbox):
    """Sessions of one mechanism, cloned from one zygote, which is restarted if it dies.

    From the second session with the same limits on, the next ones are forked ahead in the background: one fewer than
    were opened so far, at most `ready_sessions`, for the four `Limits` that were used last.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        capabilities: Capabilities,
        cgroups: Cgroups | None,
        *,
        preload: tuple[str, ...],
        ready_sessions: int,
    ) -> None:
        super().__init__(plan.mechanism, capabilities)
        self._plan = plan
        self._cgroups = cgroups
        self._preload = preload
        self._zygote: ZygoteHandle | None = None
        self._start_lock = asyncio.Lock()
        self._max_ready = ready_sessions
        self._ready: OrderedDict[Limits, _ReadySessions] = OrderedDict()
        """The least recently used limits come first."""
        self._forking: set[asyncio.Task[None]] = set()

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

    async def open_host(self, limits: Limits) -> SessionHost:
        """Take a session that was forked ahead, or open one; then fork others ahead in the background."""
        ready = self._ready.setdefault(limits, _ReadySessions())
        self._ready.move_to_end(limits)
        while len(self._ready) > _MAX_READY_LIMITS:
            for unused in self._ready.popitem(last=False)[1].hosts:
                unused.start_closing()
        host = None
        while ready.hosts and host is None and not self._closed:
            host = ready.hosts.popleft()
            if host.channel.hung_up():  # it died with its zygote
                host.start_closing()
                host = None
        if host is None:
            host = await self._open_new(limits)
        ready.num_opened += 1
        while len(ready.hosts) + ready.num_forking < min(ready.num_opened - 1, self._max_ready):
            ready.num_forking += 1
            forking = asyncio.create_task(self._fork_ahead(limits, ready))
            self._forking.add(forking)
            forking.add_done_callback(self._forking.discard)
        return host

    async def _fork_ahead(self, limits: Limits, ready: _ReadySessions) -> None:
        """Open a session and keep it for the next caller. A failure is logged; that caller opens its own."""
        try:
            host = await self._open_new(limits)
        except AgentFlyError as error:
            if not self._closed:
                _LOG.warning("a session could not be forked ahead: %s", error)
            return
        finally:
            ready.num_forking -= 1
        if self._ready.get(limits) is ready:
            ready.hosts.append(host)
        else:
            host.start_closing()

    async def _open_new(self, limits: Limits) -> SessionHost:
        """Open a session. If the zygote dies meanwhile, open it from the next one."""
        zygote = await self.start()
        try:
            return await super().open_host(limits)
        except EnvironmentFault:
            if zygote.alive:  # up to date: ending the failed session waited until the zygote answered or died
                raise
            return await super().open_host(limits)

    async def _make_host(self, limits: Limits) -> LocalHost:
        zygote = await self.start()
        return LocalHost(self._plan, self._cgroups, zygote, limits=limits, on_closed=self._hosts.discard)

    async def close(self) -> None:
        for forking in self._forking:
            forking.cancel()
        await super().close()
        await asyncio.gather(*self._forking, return_exceptions=True)
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
        self._attaching: asyncio.Future[None] | None = None
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
            # In a thread: the kernel waits for all processors, some milliseconds.
            self._attaching = asyncio.ensure_future(threads.call(self._cgroup.add, pid))
            await asyncio.shield(self._attaching)
        await self._wait_until_ready()

    def memory_kills(self) -> int:
        return self._cgroup.memory_kills() if self._cgroup else 0

    async def memory(self) -> int | None:
        return self._cgroup.memory() if self._cgroup else None

    async def pause(self, paused: bool) -> None:
        """Do nothing: an idle session uses no CPU time, and shares most of its memory."""

    async def _release(self) -> int | None:
        status = None
        if self._attaching:  # as long as the pid is that of the session
            await asyncio.wait([self._attaching])
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
    remove_leftover_folders()
    folder = Path(tempfile.mkdtemp(prefix=f"{process_name(os.getpid())}-"))
    if owner is not None:
        os.chown(folder, owner, owner)
    return folder
