"""Sessions in containers: for each a container whose first process is the session's keeper."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from agentfly.environment import Environment, Housed
from agentfly.errors import ConfigError, EnvironmentFault
from agentfly.resources.container.stream import Demultiplexer
from agentfly.resources.keeper import keeper
from agentfly.resources.owner import process_name
from agentfly.resources.sandbox import wire
from agentfly.resources.sandbox.cell import Cell
from agentfly.resources.sandbox.cells import CellSandbox
from agentfly.resources.sandbox.contract import Capabilities, SandboxUnavailable
from agentfly.resources.sandbox.limits import Limits
from agentfly.resources.sandbox.mechanisms import prove
from agentfly.resources.sandbox.view import INSIDE, WORK, environment
from agentfly.resources.sandboxed import Sandboxed
from agentfly.threads import call

if TYPE_CHECKING:
    from agentfly.resources.container.engine import Engine

_SCRATCH = ("/tmp", "/var/tmp", "/run")  # an engine may make these writable without a limit
_PROGRAM = f"{INSIDE.name}.contained"
_LAUNCHES = 16
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Container:
    """A container to run sessions in; what one may use is in its `Limits`. As a place, every instance has its own."""

    name: ClassVar[str] = "container"
    max_instances: ClassVar[int | None] = 32
    image: str
    """The image; it must be on the engine already."""
    python: str = "python3"
    """The image's interpreter, 3.9 or later."""
    user: str = "1000:1000"
    """Who user code is."""
    network: bool = False
    """Whether sessions reach the engine's default network."""
    read_only: bool = True
    """Whether only the working folder, /tmp and the like can be written to. Else a session may write into its own copy
    of the image, on the engine's disk, which no limit holds."""
    runtime: str | None = None
    """What runs it, for example `runsc` (gVisor); None: the engine's default."""
    environment: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Environment variables beside the usual ones; user code can read them."""

    def __post_init__(self) -> None:
        if not self.image or not self.python:
            raise ConfigError(f"Container(image={self.image!r}, python={self.python!r}): both must be named")
        if not isinstance(self.environment, Mapping) or not all(
            isinstance(word, str) for pair in self.environment.items() for word in pair
        ):
            raise ConfigError(f"Container(environment={self.environment!r}): it must map names to texts")

    async def house(self, kind: type[Environment]) -> Housed:
        """An environment's instance in a container of its own."""
        return await Sandboxed(self).house(kind)

    async def open_sandbox(self) -> ContainerSandbox:
        """A sandbox that has run code in a container; SandboxUnavailable says why there is none."""
        try:
            from agentfly.resources.container.engine import Engine
        except ModuleNotFoundError as error:
            raise SandboxUnavailable(f"containers need {error.name}: pip install 'agentfly[container]'") from error
        connecting = asyncio.ensure_future(call(Engine.connect))
        try:
            sandbox = ContainerSandbox(self, await asyncio.shield(connecting))
        except asyncio.CancelledError:
            connecting.add_done_callback(lambda done: done.cancelled() or done.exception() or done.result().close())
            raise
        await prove(sandbox)
        return sandbox

    def settings(self, limits: Limits, podman: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        """What the engine is asked for: of the container, and of its host."""
        boot = (INSIDE / "boot.py").read_text()
        inodes = "" if podman else f",nr_inodes={limits.inodes}"  # podman does not know it
        tmpfs = f"rw,nosuid,nodev,exec,mode=1777,size={limits.disk}{inodes}"
        of_container = {
            "image": self.image,
            "entrypoint": [self.python, "-I", "-B", "-X", "utf8", "-c", boot],
            "user": self.user,
            "hostname": "sandbox",
            "working_dir": WORK,
            "environment": {**environment(WORK), **self.environment},
        }
        of_host = {
            "mem_limit": limits.memory,
            "memswap_limit": limits.memory,
            "pids_limit": limits.processes + 1,
            "nano_cpus": None if limits.cpus is None else int(limits.cpus * 1e9),
            "read_only": self.read_only,
            "tmpfs": dict.fromkeys((WORK, *_SCRATCH), tmpfs),
            "shm_size": limits.disk,
            "network_mode": None if self.network else "none",
            "cap_drop": ["ALL"],
            "security_opt": ["no-new-privileges"],
            "runtime": self.runtime,
            "init": False,  # the keeper must be the first process
        }
        return of_container, of_host


class ContainerSandbox(CellSandbox):
    """Sessions in containers of one kind."""

    def __init__(self, container: Container, engine: Engine) -> None:
        super().__init__()
        self._container, self._engine = container, engine
        self._launches = asyncio.Semaphore(_LAUNCHES)

    @property
    def mechanism(self) -> str:
        """How sessions are confined."""
        return "container"

    @property
    def capabilities(self) -> Capabilities:
        """What is enforced, and how."""
        group, own = self._engine.cgroup, "the working folder, /tmp and the like, each a tmpfs"
        return Capabilities(
            network="the engine's" if self._container.network else "none",
            memory=group,
            processes=group,
            disk=own if self._container.read_only else "none",
            inodes="none" if self._engine.podman or not self._container.read_only else own,
            cpu=group,
            boundary=f"container ({self._container.runtime or self._engine.runtime}), seccomp",
        )

    async def open_cell(self, limits: Limits) -> Cell:
        """A fresh container; not all at once, or each would wait for the engine longer than it may."""
        async with self._launches:
            return await super().open_cell(limits)

    async def _make_cell(self, limits: Limits) -> ContainerCell:
        return ContainerCell(self._container, self._engine, limits, self._cells.discard)

    async def close(self) -> None:
        """End every session."""
        try:
            await super().close()
        finally:
            self._engine.close()


class ContainerCell(Cell):
    """One container, and the socket to the keeper in it."""

    folder = WORK

    def __init__(self, container: Container, engine: Engine, limits: Limits, forget: Callable[[Cell], object]) -> None:
        super().__init__(limits, forget)
        self._container, self._engine = container, engine
        self.name = f"{process_name(os.getpid()) or 'agentfly'}-{secrets.token_hex(4)}"
        self._stream = Demultiplexer()
        self._launching: asyncio.Task[None] | None = None
        self._pausing: asyncio.Task[None] | None = None
        self._out_of_memory = False

    async def open(self) -> None:
        """Start a container, and send its first process what it is to be."""
        # A task of its own: whoever is cancelled meanwhile, `_end` waits for the engine's answer and removes.
        self._launching = asyncio.create_task(self._launch())
        await asyncio.shield(self._launching)
        limits = {**asdict(self.limits), "watch": False, "inet": True}
        config = {"limits": limits, "confine": "container", "work": WORK, "readable": []}
        told = {"sources": _sources(), "program": _PROGRAM, "config": config}
        try:
            await self._expect("awake")
            await self.wire.send(wire.QUESTION, json.dumps(told).encode())
            await self._expect("hello")
        except wire.WireClosed as error:
            said = self._stream.complaint.decode("utf-8", "replace").strip().splitlines()
            raise SandboxUnavailable(
                f"{self._container.python} of image {self._container.image!r} does not start a session: "
                f"{said[-1] if said else error}"
            ) from error
        await self._begin()

    async def _launch(self) -> None:
        # Before there is such a container: killed in between, this process leaves none.
        await call(keeper().remember, "container", f"{self._engine.where} {self.name}")
        asked = self._container.settings(self.limits, self._engine.podman)
        self.wire = wire.Wire(await call(self._engine.launch, self.name, *asked), self._stream)
        self.wire.allow(1 << 16)

    def memory_kills(self) -> int:
        """Whether it ended for want of memory; while it lives, the keeper tells."""
        return int(self._out_of_memory)

    async def memory(self) -> int | None:
        """Bytes that the engine counts."""
        used: int | None = await call(self._engine.memory, self.name)
        return used

    async def pause(self, paused: bool) -> None:
        """Freeze it or let it go on, after whatever a cancelled caller had begun."""
        if self._pausing:
            await asyncio.wait([self._pausing])
        self._pausing = asyncio.create_task(call(self._engine.pause, self.name, paused))
        await asyncio.shield(self._pausing)

    async def _end(self) -> int | None:
        if self._launching is None:
            return None
        await asyncio.wait([self._launching])
        launched = self._launching.exception() is None
        try:
            if launched and self.wire.gone:
                ending = await call(self._engine.bury, self.name)
            else:
                ending = await call(self._engine.remove, self.name)
        except EnvironmentFault:
            _log.warning("container %s is left behind; it is removed after this process has ended", self.name)
            raise
        finally:
            if launched:
                self.wire.close()
        await call(keeper().forget, "container", f"{self._engine.where} {self.name}")
        self._out_of_memory = ending.out_of_memory
        status: int | None = ending.status
        return status


@cache
def _sources() -> dict[str, str]:
    """The trusted programs, by the names they are imported by."""
    names = {path: f"{INSIDE.name}.{path.stem}" for path in Path(INSIDE).glob("*.py")}
    return {name.removesuffix(".__init__"): path.read_text() for path, name in names.items()}
