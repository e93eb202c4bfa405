"""A sandbox on this machine: one zygote, and for each session a place that holds all it must be rid of again."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from agentfly.errors import EnvironmentFault
from agentfly.resources.sandbox import wire
from agentfly.resources.sandbox.cgroups import Cgroups, Group, is_leftover, process_name
from agentfly.resources.sandbox.contract import Capabilities, Sandbox
from agentfly.resources.sandbox.limits import Limits
from agentfly.resources.sandbox.session import LocalSession, Place
from agentfly.resources.sandbox.view import WORK
from agentfly.resources.sandbox.zygote import Plan, Zygote

OPEN_SECONDS = 60.0


class LocalSandbox(Sandbox):
    """Sessions of one mechanism, cloned from one zygote, which is started again should it die."""

    def __init__(
        self, plan: Plan, capabilities: Capabilities, cgroups: Cgroups | None, preload: tuple[str, ...]
    ) -> None:
        self._plan = plan
        self._capabilities = capabilities
        self._cgroups = cgroups
        self._preload = preload
        self._zygote: Zygote | None = None
        self._starting = asyncio.Lock()
        self._places: set[LocalPlace] = set()
        self._closed = False

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

    async def __aenter__(self) -> LocalSandbox:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

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

    async def open_session(self, limits: Limits | None = None) -> LocalSession:
        """A fresh session, ready to run."""
        limits = limits or Limits()
        return LocalSession(await self.open_place(limits), limits)

    async def open_place(self, limits: Limits) -> LocalPlace:
        """A fresh place, its keeper ready."""
        zygote = await self.start()
        place = LocalPlace(self, zygote, limits)
        self._places.add(place)
        try:
            async with asyncio.timeout(OPEN_SECONDS):
                await place.open()
        except (wire.WireError, TimeoutError, OSError) as error:
            await asyncio.shield(place.end())
            why = str(error) or type(error).__name__
            raise EnvironmentFault(f"a session of the {self.mechanism} sandbox did not start: {why}") from error
        except BaseException:
            place.end()
            raise
        return place

    async def close(self) -> None:
        """End every session and the zygote."""
        self._closed = True
        await asyncio.gather(*(asyncio.shield(place.end()) for place in list(self._places)))
        async with self._starting:
            if self._zygote:
                await self._zygote.close()


class LocalPlace(Place):
    """What one session holds on this machine: a process tree, a wire, a control group, perhaps a folder."""

    def __init__(self, sandbox: LocalSandbox, zygote: Zygote, limits: Limits) -> None:
        self._sandbox, self._zygote, self._limits = sandbox, zygote, limits
        self._group: Group | None = None
        self._number: int | None = None
        self._ending: asyncio.Task[int | None] | None = None
        self._folder: Path | None = None
        self.wire: wire.Wire
        self.folder = WORK

    async def open(self) -> None:
        """Clone, put the tree under its caps, and only then let it go on."""
        sandbox, limits = self._sandbox, self._limits
        told: dict[str, Any] = {**asdict(limits), "watch": sandbox._cgroups is None and sandbox._plan.own_files}
        if not sandbox._plan.own_files:
            self._folder = make_folder(sandbox._plan.uid)
            self.folder = told["work"] = str(self._folder)
        if sandbox._cgroups:
            self._group = sandbox._cgroups.make(limits)
        self._number, self.wire = self._zygote.open(told, credentials=self._group is not None)
        pid = await self.wire.hello()
        self.wire.allow(1 << 16)
        await self._expect("hello")
        if self._group:
            if pid is None:
                raise wire.WireBroken("the kernel does not tell who speaks")
            self._group.admit(pid)
        await self.wire.send(wire.QUESTION, json.dumps({"do": "start"}).encode())
        await self._expect("ready")

    async def _expect(self, word: str) -> None:
        _, payload = await self.wire.receive(wire.ANSWER)
        said = wire.parse(payload, {word: wire.is_count, "failed": wire.is_text}, frozenset((word, "failed")))
        if word not in said:
            raise wire.WireBroken(said.get("failed", "it did not say what was expected")[:500])

    def memory_kills(self) -> int:
        """How many processes the kernel has killed for memory."""
        return self._group.kills() if self._group else 0

    async def again(self) -> LocalPlace:
        """A fresh place like this one."""
        return await self._sandbox.open_place(self._limits)

    def end(self) -> asyncio.Task[int | None]:
        """Kill all and forget all, once."""
        if self._ending is None:
            self._ending = asyncio.get_running_loop().create_task(self._end())
        return self._ending

    async def _end(self) -> int | None:
        status = None
        if self._number is not None:
            status = await self._zygote.end(self._number)
            self.wire.close()
        if self._group:
            await self._group.remove()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._sandbox._places.discard(self)
        return status


def make_folder(owner: int | None) -> Path:
    """A folder for one session that has no file system of its own, after removing those of processes that are gone."""
    parent = Path(tempfile.gettempdir())
    for old in parent.glob("agentfly-*"):
        if is_leftover(old.name):
            with contextlib.suppress(OSError):
                shutil.rmtree(old)
    folder = Path(tempfile.mkdtemp(prefix=f"{process_name(os.getpid())}-", dir=parent))
    if owner is not None:
        os.chown(folder, owner, owner)
    return folder
