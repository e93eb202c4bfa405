"""Sandbox sessions in containers: one container per session, with the session's init as its first process."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import struct
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from agentfly.environment import Environment, InstanceHandle
from agentfly.errors import ConfigError, EnvironmentFault
from agentfly.resources.runtimes.sandbox import SandboxRuntime
from agentfly.resources.supervisor import get_supervisor
from agentfly.sandbox import channel
from agentfly.sandbox.base import Capabilities, Limits, SandboxUnavailable
from agentfly.sandbox.host import SessionHost
from agentfly.sandbox.mechanisms import verify_sandbox
from agentfly.sandbox.mounts import INSIDE, WORK, session_environment
from agentfly.sandbox.owner import process_name
from agentfly.sandbox.session import Sandbox
from agentfly.threads import call

if TYPE_CHECKING:
    from agentfly.resources.runtimes.container.engine import ContainerEngine

_SCRATCH = ("/tmp", "/var/tmp", "/run")  # an engine may make these writable without a limit
_PROGRAM = f"{INSIDE.name}.session_init"
_MAX_LAUNCHES = 16
_STREAM_HEADER = struct.Struct(">BxxxI")
"""Docker's header of a chunk: stream (1 stdout, 2 stderr) and length."""
_STDOUT = 1
_MAX_STDERR = 4000
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Container:
    """Container settings for sandbox sessions, also usable as `Pool.runtime`. Resource limits are in `Limits`."""

    name: ClassVar[str] = "container"
    max_instances: ClassVar[int | None] = 32
    image: str
    """Image name; the engine must have it already."""
    python: str = "python3"
    """The image's interpreter, 3.9 or later."""
    user: str = "1000:1000"
    """User and group id of user code. Empty: the image's."""
    folder: str = WORK
    """The folder that the session's files are in. The default is an empty one; "/" is the whole image."""
    network: bool = False
    """Whether sessions reach the engine's default network."""
    read_only: bool = True
    """Whether only the working folder, /tmp and similar folders are writable. False: a session may also write to its
    own copy of the image, on the engine's disk, without a limit."""
    capabilities: bool = False
    """Whether user code keeps the engine's default capabilities, which package managers need: chown, setuid, ….
    For images that run as root, with a runtime that confines root."""
    runtime: str | None = None
    """OCI runtime, for example `runsc` (gVisor). None: the engine's default."""
    environment: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Additional environment variables; user code can read them."""

    def __post_init__(self) -> None:
        if not self.image or not self.python:
            raise ConfigError(f"Container(image={self.image!r}, python={self.python!r}): both must be named")
        if not isinstance(self.environment, Mapping) or not all(
            isinstance(word, str) for pair in self.environment.items() for word in pair
        ):
            raise ConfigError(f"Container(environment={self.environment!r}): it must map names to texts")

    async def create(self, env_class: type[Environment]) -> InstanceHandle:
        return await SandboxRuntime(self).create(env_class)

    async def open_sandbox(self) -> ContainerSandbox:
        """Connect to the engine and run a test session; SandboxUnavailable if that fails."""
        try:
            from agentfly.resources.runtimes.container.engine import ContainerEngine
        except ModuleNotFoundError as error:
            raise SandboxUnavailable(f"containers need {error.name}: pip install 'agentfly-rl[container]'") from error
        connecting = asyncio.ensure_future(call(ContainerEngine.connect))
        try:
            sandbox = ContainerSandbox(self, await asyncio.shield(connecting))
        except asyncio.CancelledError:
            connecting.add_done_callback(lambda done: done.cancelled() or done.exception() or done.result().close())
            raise
        await verify_sandbox(sandbox)
        return sandbox

    def settings(self, limits: Limits, podman: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        """The arguments for the engine: container settings and host settings."""
        boot, frames = ((INSIDE / f"{name}.py").read_text() for name in ("bootstrap", "frames"))
        inodes = "" if podman else f",nr_inodes={limits.inodes}"  # podman does not support it
        tmpfs = f"rw,nosuid,nodev,exec,mode=1777,size={limits.disk}{inodes}"
        settings = {
            "image": self.image,
            "entrypoint": [self.python, "-I", "-B", "-X", "utf8", "-c", boot, frames],
            "user": self.user,
            "hostname": "sandbox",
            "working_dir": self.folder,
            "environment": {**session_environment(self.folder), **self.environment},
        }
        host_settings = {
            "mem_limit": limits.memory,
            "memswap_limit": limits.memory,
            "pids_limit": limits.processes + 1,
            "nano_cpus": None if limits.cpus is None else int(limits.cpus * 1e9),
            "read_only": self.read_only,
            "tmpfs": dict.fromkeys((WORK, *_SCRATCH) if self.folder == WORK else _SCRATCH, tmpfs),
            "shm_size": limits.disk,
            "network_mode": None if self.network else "none",
            "cap_drop": [] if self.capabilities else ["ALL"],
            "security_opt": ["no-new-privileges"],
            "runtime": self.runtime,
            "init": False,  # the session's init must be the first process
        }
        return settings, host_settings


class ContainerSandbox(Sandbox):
    """Opens sessions in containers with the same settings."""

    def __init__(self, container: Container, engine: ContainerEngine) -> None:
        tmpfs = "the working folder, /tmp and the like, each a tmpfs"
        capabilities = Capabilities(
            network="the engine's" if container.network else "none",
            **dict.fromkeys(("memory", "processes", "cpu"), engine.cgroup),
            disk=tmpfs if container.read_only else "none",
            inodes="none" if engine.podman or not container.read_only else tmpfs,
            boundary=f"container ({container.runtime or engine.runtime}), seccomp",
        )
        super().__init__("container", capabilities)
        self._container, self._engine = container, engine
        self._launch_slots = asyncio.Semaphore(_MAX_LAUNCHES)

    async def open_host(self, limits: Limits) -> SessionHost:
        """Start a container. Concurrent launches are limited, or they would time out waiting for the engine."""
        async with self._launch_slots:
            return await super().open_host(limits)

    async def _make_host(self, limits: Limits) -> ContainerHost:
        return ContainerHost(self._container, self._engine, limits, self._hosts.discard)

    async def close(self) -> None:
        try:
            await super().close()
        finally:
            self._engine.close()


class Demultiplexer:
    """Splits the stream of an attached container: returns stdout, which has the frames, and keeps stderr."""

    def __init__(self) -> None:
        self.stderr = b""
        """The first bytes of stderr, to which only a failing start writes."""
        self._header = b""
        self._stream = 0
        self._left = 0

    def __call__(self, data: bytes) -> bytes:
        """The stdout bytes in a piece of the stream, which may begin and end anywhere."""
        stdout = bytearray()
        view = memoryview(data)
        while view:
            if not self._left:
                missing = _STREAM_HEADER.size - len(self._header)
                self._header += view[:missing]
                view = view[missing:]
                if len(self._header) == _STREAM_HEADER.size:
                    self._stream, self._left = _STREAM_HEADER.unpack(self._header)
                    self._header = b""
                continue
            chunk = view[: self._left]
            view = view[len(chunk) :]
            self._left -= len(chunk)
            if self._stream == _STDOUT:
                stdout += chunk
            else:
                self.stderr += bytes(chunk[: _MAX_STDERR - len(self.stderr)])
        return bytes(stdout)


class ContainerHost(SessionHost):
    """One container, and the socket to the session's init in it."""

    def __init__(
        self, container: Container, engine: ContainerEngine, limits: Limits, on_closed: Callable[[SessionHost], object]
    ) -> None:
        super().__init__(limits, on_closed)
        self._container, self._engine = container, engine
        self.folder = container.folder
        self.name = f"{process_name(os.getpid()) or 'agentfly'}-{secrets.token_hex(4)}"
        self._stream = Demultiplexer()
        self._launching: asyncio.Task[None] | None = None
        self._pausing: asyncio.Task[None] | None = None
        self._out_of_memory = False

    async def open(self) -> None:
        """Start a container, and send its first process the program and its configuration."""
        # A separate task: after a cancellation `_release` waits for the engine's answer and removes the container.
        self._launching = asyncio.create_task(self._launch())
        await asyncio.shield(self._launching)
        limits = {**asdict(self.limits), "watch": False, "inet": True}
        config = {
            "limits": limits,
            "confine": "container",
            "work": self.folder,
            "readable": [],
            "capabilities": self._container.capabilities,
        }
        bootstrap = {"sources": _sources(), "program": _PROGRAM, "config": config}
        try:
            await self._expect("awake")
            await self.channel.send(channel.QUESTION, json.dumps(bootstrap).encode())
            await self._expect("hello")
        except channel.ChannelClosed as error:
            stderr = self._stream.stderr.decode("utf-8", "replace").strip().splitlines()
            raise SandboxUnavailable(
                f"{self._container.python} of image {self._container.image!r} does not start a session: "
                f"{stderr[-1] if stderr else error}"
            ) from error
        await self._wait_until_ready()

    async def _launch(self) -> None:
        # Before the container exists, so that a kill in between leaves none behind.
        await call(get_supervisor().register, "container", f"{self._engine.address} {self.name}")
        settings = self._container.settings(self.limits, self._engine.podman)
        self.channel = channel.SessionChannel(await call(self._engine.launch, self.name, *settings), self._stream)
        self.channel.allow(1 << 16)

    def memory_kills(self) -> int:
        """1 if the container ran out of memory; while it runs, its init reports this."""
        return int(self._out_of_memory)

    async def memory(self) -> int | None:
        used: int | None = await call(self._engine.memory, self.name)
        return used

    async def pause(self, paused: bool) -> None:
        """Freeze or resume it, after an operation that a cancelled caller had begun."""
        if self._pausing:
            await asyncio.wait([self._pausing])
        self._pausing = asyncio.create_task(call(self._engine.pause, self.name, paused))
        await asyncio.shield(self._pausing)

    async def _release(self) -> int | None:
        if self._launching is None:
            return None
        await asyncio.wait([self._launching])
        launched = self._launching.exception() is None
        status: int | None = None
        try:
            if launched and self.channel.gone:
                status, self._out_of_memory = await call(self._engine.wait_and_remove, self.name)
            else:
                await call(self._engine.remove, self.name)
        except EnvironmentFault:
            _LOG.warning("container %s is left behind; it is removed after this process has ended", self.name)
            raise
        finally:
            if launched:
                self.channel.close()
        await call(get_supervisor().unregister, "container", f"{self._engine.address} {self.name}")
        return status


@cache
def _sources() -> dict[str, str]:
    """Sources of the trusted programs by module name."""
    names = {path: f"{INSIDE.name}.{path.stem}" for path in Path(INSIDE).glob("*.py")}
    return {name.removesuffix(".__init__"): path.read_text() for path, name in names.items()}
