"""Environments in sandbox sessions: all their code runs there, and nothing they send is trusted."""

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from agentfly import Environment, Pool, Task, reward, tool
from agentfly.errors import EnvironmentFault
from agentfly.resources import ResourceManager
from agentfly.resources.runtimes.sandbox import SandboxRuntime
from agentfly.sandbox import Limits, SandboxUnavailable
from agentfly.sandbox.mechanisms import shared_sandbox
from tests.fakes import byte_agent, call

pytestmark = pytest.mark.usefixtures("_a_sandbox")


@pytest.fixture
async def _a_sandbox() -> None:
    try:
        await shared_sandbox(None)
    except SandboxUnavailable as error:
        pytest.skip(f"no sandbox works here: {error}")


class Counter(Environment):
    pool = Pool(runtime="sandbox")

    async def reset(self, task: Task) -> None:
        self.shown = task.columns.get("start", 0)

    @tool
    async def press(self, times: int) -> str:
        """Press."""
        self.shown += times
        return f"The counter shows {self.shown}."

    @tool
    def where(self) -> dict[str, object]:
        """Say where it lives."""
        return {"pid": os.getpid(), "uid": os.getuid(), "home": os.path.exists("/etc/passwd")}

    @tool
    def steal(self, path: str) -> object:
        """Have the host show a file of its own."""
        return {"observation": "look", "image": path}

    @tool
    async def break_down(self) -> str:
        """End the process."""
        os._exit(3)

    @tool
    async def fill(self) -> str:
        """Take all memory."""
        self.hoard = ["x" * (1 << 20) for _ in range(4000)]
        return "full"


class Finder(Environment):
    pool = Pool(runtime="sandbox")

    async def reset(self, task: Task) -> None: ...

    @tool
    def find(self, name: str) -> str:
        """Find a prebuilt environment by its name."""
        from agentfly import environments

        return str(getattr(environments, name).__module__)


@reward
def reached(env: Counter, target: int) -> float:
    return float(env.shown == target)


@pytest.fixture
async def manager() -> AsyncIterator[ResourceManager]:
    manager = ResourceManager()
    yield manager
    await manager.close()


async def test_prebuilt_environments_have_their_names_in_the_session(manager: ResourceManager) -> None:
    agent = byte_agent([call("find", name="CodeInterpreter"), "done"], tools=[Finder], manager=manager)
    (chain,) = await agent.run("Go.")
    assert "agentfly.environments.code_interpreter" in [message.text for message in chain.messages]


async def test_chain_acts_in_sandbox_instance(manager: ResourceManager) -> None:
    agent = byte_agent([call("press", times=3), "done"], tools=[Counter], reward=reached, manager=manager)
    result = await agent.run([{"question": "Go.", "start": 4, "target": 7}], num_chains=3)
    assert result.rewards == [1.0, 1.0, 1.0]
    (figures,) = manager.pool_metrics()
    assert (figures.runtime, figures.leased, figures.evicted) == ("sandbox", 0, 0)


async def test_sandbox_instance_runs_as_another_user(manager: ResourceManager) -> None:
    async with manager.leases(Task.of("Q"), [Counter]) as leases:
        counter = await leases.get(Counter)
        folder = await asyncio.to_thread(counter.where)
    assert folder["pid"] != os.getpid()
    assert folder["uid"] != 0
    assert folder["home"] is False


async def test_ended_session_is_a_fault_and_is_replaced(manager: ResourceManager) -> None:
    agent = byte_agent([call("break_down"), "done"], tools=[Counter], manager=manager)
    (trajectory,) = await agent.run("Go.", failures={"retries": 0})
    assert trajectory.stop.value == "environment_fault"
    async with manager.leases(Task.of("Q"), [Counter]) as leases:
        assert (await leases.get(Counter)).shown == 0
    assert sum(pool.evicted for pool in manager.pool_metrics()) == 1


async def test_sandbox_memory_is_limited() -> None:
    small = replace(Counter.pool, runtime=SandboxRuntime(limits=Limits(memory=256 << 20)))
    manager = ResourceManager({Counter: small})
    async with manager.leases(Task.of("Q"), [Counter]) as leases:
        counter = await leases.get(Counter)
        with pytest.raises((MemoryError, EnvironmentFault)):
            await counter.fill()
    await manager.close()


async def test_host_files_are_not_read_for_the_instance(manager: ResourceManager, tmp_path: Path) -> None:
    secret = tmp_path / "secret.png"
    secret.write_bytes(b"\x89PNG secret")
    agent = byte_agent([call("steal", path=str(secret)), "done"], tools=[Counter], manager=manager)
    (trajectory,) = await agent.run("Go.", failures={"retries": 0})
    assert trajectory.stop.value == "environment_fault"
    assert "names an image by path" in trajectory.failures[0].message
