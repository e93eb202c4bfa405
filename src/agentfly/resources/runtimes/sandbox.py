"""`Pool(runtime="sandbox")` and `Pool(runtime=Container(image=…))`: every instance in its own sandbox session.

All code of the environment runs in the session, under its limits. Answers are decoded as plain data, so an environment
that was taken over by the code it runs cannot reach the host.
"""

from __future__ import annotations

import asyncio
import io
import sys
import zipfile
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from agentfly.environment import Environment, InstanceHandle
from agentfly.errors import DISTRIBUTION, ConfigError, EnvironmentFault
from agentfly.resources.rpc.codec import LIMIT
from agentfly.resources.rpc.proxy import make_proxy
from agentfly.sandbox import EndReason, Limits, Session
from agentfly.sandbox.mechanisms import Mechanism, shared_sandbox

_FOLDER = ".agentfly"
_BOOT = f"""
import sys
sys.path.insert(0, {_FOLDER + "/sources.zip"!r})
def _agentfly_serve(started):
    import asyncio
    global _agentfly_server, _agentfly_loop
    if not started:
        from agentfly.resources.rpc.server import RpcServer
        _agentfly_server, _agentfly_loop = RpcServer(), asyncio.new_event_loop()
        return
    with open({_FOLDER + "/request"!r}, "rb") as file:
        request = file.read()
    answer = _agentfly_loop.run_until_complete(_agentfly_server.answer(request))
    with open({_FOLDER + "/answer"!r}, "wb") as file:
        file.write(answer)
_agentfly_serve(False)
print(*sys.version_info[:2])
"""


class SandboxRuntime:
    """Runs instances in sandbox sessions of one mechanism."""

    name: str = "sandbox"

    def __init__(self, mechanism: Mechanism = None, limits: Limits | None = None) -> None:
        """Set the mechanism and the limits of each session.

        mechanism: a name, a Container, or None for the strongest one that works on this machine.
        limits: None takes the defaults with one hour per call, since the pool has timeouts of its own.
        """
        self.max_instances: int | None = 64
        self._mechanism = mechanism
        self._limits = limits or Limits(seconds=3600.0)

    async def create(self, env_class: type[Environment]) -> InstanceHandle:
        session = await (await shared_sandbox(self._mechanism)).open_session(self._limits)
        try:
            await session.put(f"{_FOLDER}/sources.zip", _sources())
            booted = await session.run(_BOOT)
            version = ".".join(map(str, sys.version_info[:2]))
            if booted.end is not EndReason.OK:
                raise EnvironmentFault(f"the {self.name} could not start {env_class.__name__}: {booted.text[-2000:]}")
            if booted.output.split() != version.split("."):
                raise ConfigError(
                    f"{env_class.__name__} is sent from Python {version} to Python {'.'.join(booted.output.split())} "
                    f"in the {self.name}; its code needs the same there: use an image or interpreter with {version}"
                )
            environment = await make_proxy(env_class, _SessionTransport(session), everything=True)
            handle = _SandboxHandle(environment, session)
            await handle.measure()
        except BaseException:
            await session.close()
            raise
        return handle


class _SessionTransport:
    """Carries requests into a session and answers out of it, each as a file."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._lock = asyncio.Lock()

    async def ask(self, request: bytes) -> bytes:
        """Execute one request at a time. A cancelled call ends the session."""
        async with self._lock:
            await self._session.put(f"{_FOLDER}/request", request)
            outcome = await self._session.run("_agentfly_serve(True)")
            if outcome.end is not EndReason.OK:
                raise EnvironmentFault(f"the session failed: {outcome.text[-2000:]}")
            return await self._session.get(f"{_FOLDER}/answer", 2 * LIMIT)


class _SandboxHandle(InstanceHandle):
    """An instance in a sandbox session."""

    def __init__(self, environment: Environment, session: Session) -> None:
        super().__init__(environment)
        self._session = session
        self._memory: int | None = None

    def exit_reason(self) -> str | None:
        return None if self._session.alive else "its session is over"

    def memory(self) -> int | None:
        """Bytes used by the session at the last measurement: at the start and at every pause."""
        return self._memory

    async def measure(self) -> None:
        self._memory = await self._session.memory()

    async def pause(self) -> None:
        """Pause the session if its mechanism supports it."""
        await self.measure()
        await self._session.pause()

    async def resume(self) -> None:
        await self._session.resume()

    async def terminate(self) -> None:
        await self._session.close()


@cache
def _sources() -> bytes:
    """A zip of AgentFly and cloudpickle for an interpreter that may have neither.

    The metadata comes along: without entry points, no environment is found by its name.
    """
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as zipped:
        for package in ("agentfly", "cloudpickle"):
            folder = Path(str(import_module(package).__file__)).parent
            for path in sorted(folder.rglob("*.py")):
                zipped.write(path, Path(package) / path.relative_to(folder))
        with suppress(PackageNotFoundError):  # it runs from its sources
            for name in ("METADATA", "entry_points.txt"):
                content = distribution(DISTRIBUTION).read_text(name) or ""
                zipped.writestr(f"{DISTRIBUTION.replace('-', '_')}.dist-info/{name}", content)
    return archive.getvalue()
