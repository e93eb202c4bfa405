"""Sessions in containers of a real engine."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from agentfly.resources.runtimes.container import Container, ContainerSandbox
from agentfly.sandbox import Limits, Session, open_sandbox
from tests.resources.engine import IMAGE, Podman

# The docker package does not close a socket that it could not connect; collecting the exception closes it.
UNCONNECTED = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
SMALL = Limits(seconds=60, memory=256 << 20, processes=24, disk=16 << 20, output=4000)


@pytest.fixture
def docker_host(engine: Podman, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", engine.url)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def sandbox(engine: Podman) -> AsyncIterator[ContainerSandbox]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DOCKER_HOST", engine.url)
        opened = await open_sandbox(Container(image=IMAGE))
    async with opened:
        yield opened


@pytest_asyncio.fixture(loop_scope="session")
async def session(sandbox: ContainerSandbox) -> AsyncIterator[Session]:
    opened = await sandbox.open_session(SMALL)
    yield opened
    await opened.close()
