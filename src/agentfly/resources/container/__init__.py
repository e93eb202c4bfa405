"""Sessions in containers of Docker, podman, or whatever else speaks the Docker API at DOCKER_HOST.

async with await open_sandbox(Container(image="python:3.12-slim")) as sandbox:
    session = await sandbox.open_session(Limits(memory=1 << 30))
    outcome = await session.run("2 ** 100")
"""

from agentfly.resources.container.sandbox import Container, ContainerSandbox

__all__ = ["Container", "ContainerSandbox"]
