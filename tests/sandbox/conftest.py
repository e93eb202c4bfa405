"""Real sandboxes, one of each mechanism for the whole run; a fresh session for each test."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import agentfly
from agentfly.sandbox import Limits, LocalSandbox, SandboxUnavailable, Session, open_sandbox
from agentfly.sandbox.mounts import find_python, is_closed_to_others

Opener = Callable[..., Awaitable[Session]]
SMALL = Limits(seconds=60, memory=256 << 20, processes=24, disk=16 << 20, inodes=500, output=4000)


class Sandboxes:
    """Opened on demand; one that cannot start here skips the test that wants it, and says why."""

    def __init__(self) -> None:
        self._open: dict[str, LocalSandbox | str] = {}

    async def get(self, mechanism: str) -> LocalSandbox:
        if mechanism not in self._open:
            try:
                preload = ("numpy", "sympy") if mechanism == "zygote" else ()
                self._open[mechanism] = await open_sandbox(mechanism, reduced=True, preload=preload, ready_sessions=0)
            except SandboxUnavailable as error:
                self._open[mechanism] = str(error)
        opened = self._open[mechanism]
        if isinstance(opened, str):
            pytest.skip(f"the {mechanism} sandbox does not work here: {opened}")
        return opened

    async def close(self) -> None:
        for opened in self._open.values():
            if isinstance(opened, LocalSandbox):
                await opened.close()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def sandboxes() -> AsyncIterator[Sandboxes]:
    opened = Sandboxes()
    yield opened
    await opened.close()


@pytest_asyncio.fixture(loop_scope="session")
async def open_session(sandboxes: Sandboxes) -> AsyncIterator[Opener]:
    """Open a session of a mechanism; it is closed after the test."""
    opened: list[Session] = []

    async def opener(mechanism: str = "zygote", limits: Limits = SMALL) -> Session:
        opened.append(await (await sandboxes.get(mechanism)).open_session(limits))
        return opened[-1]

    yield opener
    for session in opened:
        await session.close()


@pytest_asyncio.fixture(loop_scope="session")
async def session(open_session: Opener) -> Session:
    """A session of the strongest mechanism, or of the one without bubblewrap where that is missing."""
    try:
        return await open_session("zygote")
    except pytest.skip.Exception:
        return await open_session("namespaces")


_AS_ORDINARY_USER = """
import asyncio, json, os, resource, sys
from agentfly.sandbox import Limits, SandboxUnavailable, open_sandbox
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
{script}
try:
    print(json.dumps(asyncio.run(main(*sys.argv[1:]))))
except SandboxUnavailable as error:
    print(json.dumps({{"unavailable": str(error)}}))
"""


@pytest.fixture
def as_ordinary_user(tmp_path: Path) -> Callable[..., Any]:
    """Run the coroutine function `main` of a script as a user without rights, at `ulimit -n 1024`; what it returns."""
    sources, libraries = str(Path(agentfly.__file__).parents[1]), str(Path(pytest.__file__).parents[1])
    python, line = sys.executable, []
    if os.getuid() == 0:
        if is_closed_to_others(python):
            python = "/usr/bin/python3"
            if not os.path.exists(python) or find_python(python).version != sys.version_info[:2]:
                pytest.skip(f"an ordinary user cannot run {sys.executable}, and {python} is not the same version")
        user = str(1_890_000_000 + os.getpid())
        line = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "--"]
        if any(map(is_closed_to_others, (sources, libraries))):
            pytest.skip(f"an ordinary user cannot read {sources} and {libraries}")

    def run(script: str, *arguments: str) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            os.chmod(folder, 0o777)
            done = subprocess.run(
                [*line, python, "-c", _AS_ORDINARY_USER.format(script=script), *arguments],
                capture_output=True,
                text=True,
                timeout=120,
                env={"PATH": os.environ["PATH"], "PYTHONPATH": f"{sources}:{libraries}", "TMPDIR": folder},
            )
            assert done.returncode == 0, done.stderr[-3000:]
            result = json.loads(done.stdout.splitlines()[-1])
        if isinstance(result, dict) and "unavailable" in result:
            pytest.skip(f"an ordinary user has no such sandbox here: {result['unavailable']}")
        return result

    return run
