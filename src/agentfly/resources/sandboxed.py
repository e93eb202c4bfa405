"""`Pool(place="sandbox")`, and `Pool(place=Container(image=…))` through it: an instance in a session of its own.

All that the environment does happens in the session, under its limits. What it sends back is read as plain data, so an
environment that was taken over by what runs in it reaches nothing on the host.
"""

from __future__ import annotations

import asyncio
import io
import sys
import zipfile
from functools import cache
from importlib import import_module
from pathlib import Path

from agentfly.environment import Environment, Housed
from agentfly.errors import ConfigError, EnvironmentFault
from agentfly.resources.remote.plain import LIMIT
from agentfly.resources.remote.stand_in import stand_in
from agentfly.resources.sandbox import CellSession, End, Limits
from agentfly.resources.sandbox.shared import Mechanism, shared_sandbox

_FOLDER = ".agentfly"
_BOOT = f"""
import sys
sys.path.insert(0, {_FOLDER + "/sources.zip"!r})
def _agentfly_serve(asked):
    import asyncio
    global _agentfly_servant, _agentfly_loop
    if asked == 0:
        from agentfly.resources.remote.serving import Servant
        _agentfly_servant, _agentfly_loop = Servant(), asyncio.new_event_loop()
        return
    with open({_FOLDER + "/request"!r}, "rb") as file:
        request = file.read()
    answer = _agentfly_loop.run_until_complete(_agentfly_servant.answer(request))
    with open({_FOLDER + "/answer"!r}, "wb") as file:
        file.write(answer)
_agentfly_serve(0)
print(*sys.version_info[:2])
"""


class Sandboxed:
    """Instances in sessions of one mechanism: a name, a Container, or None for the strongest that works here."""

    name: str = "sandbox"

    def __init__(self, mechanism: Mechanism = None, limits: Limits | None = None) -> None:
        """`limits`: of each session; None takes the usual ones, with an hour for a call: the pool has timeouts too."""
        self.max_instances: int | None = 64
        self._mechanism = mechanism
        self._limits = limits or Limits(seconds=3600.0)

    async def house(self, kind: type[Environment]) -> Housed:
        """Make an instance in a fresh session."""
        session = await (await shared_sandbox(self._mechanism)).open_session(self._limits)
        try:
            await session.put(f"{_FOLDER}/sources.zip", _sources())
            booted = await session.run(_BOOT)
            version = ".".join(map(str, sys.version_info[:2]))
            if booted.end is not End.OK:
                raise EnvironmentFault(f"{kind.__name__} found no place in the {self.name}: {booted.text[-2000:]}")
            if booted.output.split() != version.split("."):
                raise ConfigError(
                    f"{kind.__name__} is sent from Python {version} to Python {'.'.join(booted.output.split())} in the "
                    f"{self.name}; its code needs the same there: use an image or interpreter with {version}"
                )
            housed = _InSession(await stand_in(kind, _Way(session), everything=True), session)
            await housed.measure()
        except BaseException:
            await session.close()
            raise
        return housed


class _Way:
    """Carries requests into a session as a file, and answers out as another."""

    def __init__(self, session: CellSession) -> None:
        self._session = session
        self._turns = asyncio.Lock()

    async def ask(self, request: bytes) -> bytes:
        """One at a time. A call that was given up in the middle ends the session."""
        async with self._turns:
            await self._session.put(f"{_FOLDER}/request", request)
            outcome = await self._session.run("_agentfly_serve(1)")
            if outcome.end is not End.OK:
                raise EnvironmentFault(f"the session failed: {outcome.text[-2000:]}")
            return await self._session.get(f"{_FOLDER}/answer", 2 * LIMIT)


class _InSession(Housed):
    """An instance in a session."""

    def __init__(self, environment: Environment, session: CellSession) -> None:
        super().__init__(environment)
        self._session = session
        self._memory: int | None = None

    def death(self) -> str | None:
        """Why the session is over; None while it is not."""
        return None if self._session.alive else "its session is over"

    def memory(self) -> int | None:
        """Bytes when it was last measured: at the start, and whenever it comes to rest."""
        return self._memory

    async def measure(self) -> None:
        """See how much memory the session holds."""
        self._memory = await self._session.memory()

    async def rest(self) -> None:
        """Pause the session, where its mechanism can."""
        await self.measure()
        await self._session.rest()

    async def wake(self) -> None:
        """Let it go on."""
        await self._session.wake()

    async def end(self) -> None:
        """End every process of the session."""
        await self._session.close()


@cache
def _sources() -> bytes:
    """AgentFly and cloudpickle, for a Python that may have neither."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as zipped:
        for package in ("agentfly", "cloudpickle"):
            folder = Path(str(import_module(package).__file__)).parent
            for path in sorted(folder.rglob("*.py")):
                zipped.write(path, Path(package) / path.relative_to(folder))
    return archive.getvalue()
