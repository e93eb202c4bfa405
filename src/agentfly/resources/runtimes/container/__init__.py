"""Sandbox sessions in containers of Docker, podman, or any engine with the Docker API at DOCKER_HOST.

async with await open_sandbox(Container(image="python:3.12-slim")) as sandbox:
    session = await sandbox.open_session(Limits(memory=1 << 30))
    outcome = await session.run("2 ** 100")
"""

from agentfly.resources.runtimes.container.sandbox import Container, ContainerSandbox

__all__ = ["Container", "ContainerSandbox"]
