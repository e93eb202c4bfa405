"""Environments in containers: leased, paused while idle, removed when they are evicted."""

import os
from dataclasses import replace

import pytest

from agentfly import Environment, Pool, Task, reward, tool
from agentfly.resources import ResourceManager, allocator
from agentfly.resources.runtimes.container import Container
from tests.fakes import byte_agent, call
from tests.resources.engine import IMAGE, Podman
from tests.resources.test_manager import until

pytestmark = pytest.mark.usefixtures("docker_host")


class Counter(Environment):
    async def reset(self, task: Task) -> None:
        self.shown = task.columns.get("start", 0)

    @tool
    async def press(self, times: int) -> str:
        """Press."""
        self.shown += times
        return f"{self.shown} on {os.uname().nodename}, beside {sorted(os.listdir('/session'))}"


@reward
def reached(env: Counter, target: int) -> float:
    return float(env.shown == target)


async def test_chains_act_in_containers_that_pause_and_are_removed(
    engine: Podman, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allocator, "PAUSE_AFTER", 0.05)
    containers_before = engine.containers()
    manager = ResourceManager({Counter: Pool(runtime=Container(IMAGE), max_instances=2)})
    script = [call("press", times=3), "done"]
    agent = byte_agent(script, tools=[Counter], reward=reached, manager=manager)
    result = await agent.run([{"question": "Go.", "start": 4, "target": 7}], num_chains=4)
    assert result.rewards == [1.0] * 4
    assert "on sandbox" in result[0].messages[2].text
    await until(lambda: manager.pool_metrics()[0].warm == 2)
    assert manager.pool_metrics()[0].runtime == "container"
    await until(lambda: count_paused_containers(engine) == 2)
    (again,) = await agent.run({"question": "Go.", "start": 1, "target": 4})  # one is woken
    assert again.reward == 1.0
    await manager.close()
    assert engine.containers() == containers_before


async def test_a_container_killed_from_outside_is_a_fault_and_is_replaced(engine: Podman) -> None:
    manager = ResourceManager({Counter: replace(Counter.pool, runtime=Container(IMAGE))})
    containers_before = engine.containers()
    async with manager.leases(Task.of("Q"), [Counter]) as leases:
        await leases.get(Counter)
    with engine.client() as client:
        for name in set(engine.containers()) - set(containers_before):
            client.kill(name)
    async with manager.leases(Task.of("Q"), [Counter]) as leases:
        assert (await leases.get(Counter)).shown == 0
    (figures,) = manager.pool_metrics()
    assert (figures.evicted, figures.started) == (1, 2)
    await manager.close()
    assert engine.containers() == containers_before


def count_paused_containers(engine: Podman) -> int:
    with engine.client() as client:
        return len(client.containers(filters={"status": "paused"}))
