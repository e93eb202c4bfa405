"""Configurations that cannot work are rejected, with instructions."""

import gc

import pytest

from agentfly.errors import ConfigError
from agentfly.resources.runtimes.container import Container
from agentfly.sandbox import SandboxUnavailable, open_sandbox
from tests.resources.engine import BARE_IMAGE, IMAGE, Podman
from tests.resources.runtimes.container.conftest import UNCONNECTED

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.usefixtures("docker_host")]


@pytest.mark.parametrize(
    ("container", "words"),
    [
        (Container(image="localhost/not-there"), "no image 'localhost/not-there': docker pull localhost/not-there"),
        (Container(image=BARE_IMAGE), f"image '{BARE_IMAGE}' has no python3"),
        (
            Container(image=IMAGE, python="sh"),
            "sh of image .* does not start a session: .*(?:-B|-I)",
        ),
        (Container(image=IMAGE, python="true"), "true of image .* does not start a session: the other end is gone"),
        (Container(image=IMAGE, runtime="runsc"), "runtime 'oci' where 'runsc' was asked for"),
        (Container(image=IMAGE, user="no-such-user"), "no-such-user"),
    ],
)
async def test_container_that_cannot_start(engine: Podman, container: Container, words: str) -> None:
    containers_before = engine.containers()
    with pytest.raises(SandboxUnavailable, match=words):
        await open_sandbox(container)
    assert engine.containers() == containers_before


@UNCONNECTED
@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("unix:///nowhere/engine.sock", "no container engine answers at unix:///nowhere/engine.sock"),
        ("tcp://127.0.0.1:9", "no container engine answers at tcp://127.0.0.1:9"),
        ("nonsense://x", "no container engine answers at nonsense://x"),
        ("ssh://somebody@somewhere", "reached through ssh or TLS"),
    ],
)
async def test_unreachable_engine(monkeypatch: pytest.MonkeyPatch, where: str, words: str) -> None:
    monkeypatch.setenv("DOCKER_HOST", where)
    with pytest.raises(SandboxUnavailable, match=words):
        await open_sandbox(Container(image=IMAGE))
    gc.collect()


@pytest.mark.parametrize(
    "about", [{"MemoryLimit": False}, {"SecurityOptions": ["name=rootless"], "CgroupVersion": "1"}]
)
async def test_engine_without_limits_is_rejected(monkeypatch: pytest.MonkeyPatch, about: dict[str, object]) -> None:
    docker = pytest.importorskip("docker")
    real = docker.APIClient.info
    monkeypatch.setattr(docker.APIClient, "info", lambda self: {**real(self), **about})
    with pytest.raises(SandboxUnavailable, match="cannot hold a container to its limits"):
        await open_sandbox(Container(image=IMAGE))


async def test_invalid_settings_are_rejected() -> None:
    with pytest.raises(ConfigError, match="image=''"):
        Container(image="")
    with pytest.raises(ConfigError, match="environment"):
        Container(image=IMAGE, environment={"A": 1})  # type: ignore[dict-item]
    assert hash(Container(image=IMAGE, environment={"A": "1"})) == hash(Container(image=IMAGE, environment={"A": "1"}))
