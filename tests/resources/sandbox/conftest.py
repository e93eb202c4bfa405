"""Real sandboxes, one of each mechanism for the whole run; a fresh session for each test."""

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio

from agentfly.resources.sandbox import CellSession, Limits, LocalSandbox, SandboxUnavailable, open_sandbox

Opener = Callable[..., Awaitable[CellSession]]
SMALL = Limits(seconds=10, memory=256 << 20, processes=24, disk=16 << 20, inodes=500, output=4000)


class Sandboxes:
    """Opened on demand; one that cannot start here skips the test that wants it, and says why."""

    def __init__(self) -> None:
        self._open: dict[str, LocalSandbox | str] = {}

    async def get(self, mechanism: str) -> LocalSandbox:
        if mechanism not in self._open:
            try:
                preload = ("numpy", "sympy") if mechanism == "zygote" else ()
                self._open[mechanism] = await open_sandbox(mechanism, reduced=True, preload=preload)
            except SandboxUnavailable as error:
                self._open[mechanism] = str(error)
        found = self._open[mechanism]
        if isinstance(found, str):
            pytest.skip(f"the {mechanism} sandbox does not work here: {found}")
        return found

    async def close(self) -> None:
        for each in self._open.values():
            if isinstance(each, LocalSandbox):
                await each.close()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def sandboxes() -> AsyncIterator[Sandboxes]:
    opened = Sandboxes()
    yield opened
    await opened.close()


@pytest_asyncio.fixture(loop_scope="session")
async def open_session(sandboxes: Sandboxes) -> AsyncIterator[Opener]:
    """Open a session of a mechanism; it is closed after the test."""
    opened: list[CellSession] = []

    async def opener(mechanism: str = "zygote", limits: Limits = SMALL) -> CellSession:
        opened.append(await (await sandboxes.get(mechanism)).open_session(limits))
        return opened[-1]

    yield opener
    for session in opened:
        await session.close()


@pytest_asyncio.fixture(loop_scope="session")
async def session(open_session: Opener) -> CellSession:
    """A session of the strongest mechanism, or of the one without bubblewrap where that is missing."""
    try:
        return await open_session("zygote")
    except pytest.skip.Exception:
        return await open_session("namespaces")
