"""Instances and managers on a real Ray cluster of several nodes, some of which die."""

import asyncio
import contextlib
import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from agentfly import Environment, Pool, Task, reward, tool
from agentfly.environment import Scope
from agentfly.errors import ConfigError, EnvironmentFault
from agentfly.resources.runtimes.ray import RayManager, RayRuntime
from agentfly.resources.runtimes.ray.manager_actor import LINGER
from agentfly.resources.runtimes.ray.runtime import ActorHandle
from agentfly.trajectory import StopReason
from tests.fakes import byte_agent, call

ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'agentfly-rl[ray]'")

pytestmark = pytest.mark.slow_smoke

TASK = Task.of("Make it show 7.")
SMALL = {"object_store_memory": 80 << 20}
SECOND_CLIENT = """
import asyncio, sys
from agentfly import Task
from agentfly.resources.runtimes.ray import RayManager
from tests.resources.runtimes.test_ray import Counter, ONE

async def main():
    manager = RayManager(sys.argv[1], {Counter: ONE})
    async with manager.leases(Task.of("hold"), [Counter]) as leases:
        await leases.get(Counter)
        print("held", flush=True)
        async with manager.leases(Task.of("wait"), [Counter]) as others:
            await others.get(Counter)

asyncio.run(main())
"""


class Counter(Environment):
    """A world that can be asked for anything."""

    def __init__(self) -> None:
        self.shown = 0
        self.asleep = self.cancelled = False

    async def reset(self, task: Task) -> None:
        self.shown = 0

    @tool
    async def press(self, times: int) -> str:
        """Press the button the given number of times."""
        self.shown += times
        return f"The counter shows {self.shown}."

    async def node(self) -> str:
        node: str = ray.get_runtime_context().get_node_id()
        return node

    async def pid(self) -> int:
        return os.getpid()

    async def sleep(self, seconds: float) -> None:
        self.asleep = True
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self.cancelled = True
            raise

    async def hang(self) -> None:
        time.sleep(600)  # noqa: ASYNC251  what a careless environment does

    async def start_others(self) -> list[int]:
        shell = "setsid sleep 600 & echo $!; sleep 600 & echo $!; wait"
        child = await asyncio.create_subprocess_exec("sh", "-c", shell, stdout=subprocess.PIPE)
        assert child.stdout is not None
        return [child.pid, *[int(await child.stdout.readline()) for _ in range(2)]]

    async def crash(self) -> None:
        os._exit(3)


ONE = Pool(max_instances=1)


@reward
def shows_seven(env: Counter) -> float:
    return float(env.shown == 7)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes on this machine, each with processes of its own; nothing is left of them."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as undoing:
        folder = tempfile.mkdtemp(prefix="ray")  # short: sockets live in it
        undoing.callback(shutil.rmtree, folder, ignore_errors=True)
        patch.setenv("RAY_TMPDIR", folder)
        patch.setenv("RAY_AUTH_MODE", "disabled")  # else it writes a token to the user's home
        quick = {"health_check_period_ms": 1000, "health_check_failure_threshold": 3, "health_check_timeout_ms": 3000}
        head = {"num_cpus": 4, "include_dashboard": False, "_system_config": quick, **SMALL}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        undoing.callback(cluster.shutdown)
        cluster.add_node(num_cpus=4, resources={"slot": 1}, **SMALL)
        undoing.callback(ray.shutdown)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
        yield cluster


@pytest.fixture
async def counter(cluster: Any) -> AsyncIterator[ActorHandle]:
    housed = await RayRuntime().create(Counter)
    assert isinstance(housed, ActorHandle)
    yield housed
    await housed.terminate()


async def until(true: Callable[[], bool], seconds: float = 90.0) -> None:
    async with asyncio.timeout(seconds):
        while not true():
            await asyncio.sleep(0.05)


def alive(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError), open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] not in "ZX"
    return False


# ── the place ──


async def test_instance_in_an_actor(counter: ActorHandle) -> None:
    world: Any = counter.environment
    assert isinstance(world, Counter)
    await world.reset(TASK)
    assert await world.press(3) == "The counter shows 3."
    assert world.shown == 3
    assert await world.pid() != os.getpid()
    assert counter.exit_reason() is None
    assert (counter.memory() or 0) > 10 << 20


async def test_instances_are_spread_over_the_nodes(cluster: Any) -> None:
    housed = await asyncio.gather(*[RayRuntime().create(Counter) for _ in range(4)])
    worlds: list[Any] = [handle.environment for handle in housed]
    assert len({await world.node() for world in worlds}) == 2
    await asyncio.gather(*[handle.terminate() for handle in housed])


async def test_cancellation_is_forwarded(counter: ActorHandle) -> None:
    world: Any = counter.environment
    sleeping = asyncio.create_task(world.sleep(600))
    async with asyncio.timeout(60):
        while not world.asleep:
            await world.press(1)
        sleeping.cancel()
        while not world.cancelled:
            await world.press(1)


async def test_dead_actor_fault_names_its_node(counter: ActorHandle) -> None:
    world: Any = counter.environment
    with pytest.raises(EnvironmentFault, match=r"Counter on node .* is lost: "):
        await world.crash()
    await until(lambda: counter.exit_reason() is not None)
    assert "Counter on node" in str(counter.exit_reason())


async def test_end_kills_all_descendants(counter: ActorHandle) -> None:
    world: Any = counter.environment
    pids = [await world.pid(), *await world.start_others()]
    assert len(pids) == 4
    assert all(map(alive, pids))
    await counter.terminate()
    await until(lambda: not any(map(alive, pids)))


async def test_hanging_actor_is_killed(counter: ActorHandle) -> None:
    world: Any = counter.environment
    pid = await world.pid()
    hanging = asyncio.create_task(world.hang())
    await asyncio.sleep(0.2)
    await counter.terminate()
    with pytest.raises(EnvironmentFault, match="is lost"):
        await hanging
    await until(lambda: not alive(pid))


async def test_infeasible_resources_are_rejected(cluster: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"asks for 0.1 CPU, 4 GPU; no node of the cluster has that: they have 4 CPU, 0 GPU"
    ):
        await RayRuntime(num_gpus=4).create(Counter)
    with pytest.raises(ConfigError, match="bogus"):
        await RayRuntime(options={"bogus": 1}).create(Counter)
    with pytest.raises(ConfigError, match="num_cpus must be a number of at least 0, not -1"):
        RayRuntime(num_cpus=-1)
    with pytest.raises(ConfigError, match="may not set lifetime"):
        await RayRuntime(options={"lifetime": "detached"}).create(Counter)


async def test_resources_in_use_are_waited_for(cluster: Any) -> None:
    runtime = RayRuntime(resources={"slot": 1})
    first = await runtime.create(Counter)
    with pytest.raises(TimeoutError):  # and nothing is left of it that would take the slot
        async with asyncio.timeout(0.5):
            await runtime.create(Counter)
    second = asyncio.create_task(runtime.create(Counter))
    await asyncio.sleep(0.5)
    assert not second.done()
    await first.terminate()
    await (await second).terminate()


async def test_missing_ray_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'agentfly-rl\[ray\]'"):
        await RayRuntime().create(Counter)


# ── the shared manager ──


@pytest.fixture(scope="module")
def shared_manager(cluster: Any) -> Iterator[RayManager]:
    """One manager for several tests, which leave its only instance where they found it."""
    manager = RayManager("shared", {Counter: ONE})
    yield manager
    asyncio.run(manager.close())


async def test_pool_metrics_of_manager_and_process(shared_manager: RayManager) -> None:
    assert shared_manager.pool_metrics() == []
    async with shared_manager.leases(TASK, [Counter]) as leases:
        await leases.act([Counter], lambda environments: environments[Counter].press(2))  # type: ignore[attr-defined]
        [figures] = shared_manager.pool_metrics()
        assert (figures.environment, figures.runtime, figures.leased, shared_manager.num_instances) == (
            "Counter",
            "ray",
            1,
            1,
        )
        assert figures.seconds["step"]["count"] == figures.seconds["reset"]["count"] == 1
    await until(lambda: shared_manager.metrics()["Counter/leased"] == 0)
    assert shared_manager.pool_metrics()[0].warm == 1


async def test_cancelled_request_holds_no_lease(shared_manager: RayManager) -> None:
    async def ask(seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds), shared_manager.leases(TASK, [Counter]) as leases:
                await leases.get(Counter)

    await ask(60)
    for milliseconds in range(0, 20, 2):
        await asyncio.gather(*[ask(milliseconds / 1000) for _ in range(5)])
    await until(lambda: [(pool.leased, pool.waiting) for pool in shared_manager.pool_metrics()] == [(0, 0)])
    await ask(60)


async def test_leases_of_killed_process_are_released(cluster: Any, shared_manager: RayManager) -> None:
    buried = sum(pool.evicted for pool in shared_manager.pool_metrics())
    environment = {**os.environ, "RAY_ADDRESS": cluster.address, "PYTHONPATH": os.pathsep.join(sys.path)}
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SECOND_CLIENT, shared_manager.name, stdout=subprocess.PIPE, env=environment
    )
    assert child.stdout is not None
    assert await child.stdout.readline() == b"held\n"
    async with shared_manager.leases(TASK, [Counter]) as leases:
        waiting = asyncio.create_task(leases.get(Counter))
        await until(lambda: [pool.waiting for pool in shared_manager.pool_metrics()] == [2])
        child.send_signal(signal.SIGKILL)
        await child.wait()
        async with asyncio.timeout(60):
            assert (await waiting).shown == 0
        assert [(pool.leased, pool.evicted) for pool in shared_manager.pool_metrics()] == [(1, buried + 1)]


async def test_dead_manager_is_a_fault_and_ends_its_instances(cluster: Any) -> None:
    shared_manager = RayManager("mortal", {Counter: ONE})
    async with shared_manager.leases(TASK, [Counter]) as leases, shared_manager.leases(TASK, [Counter]) as other_leases:
        world = await leases.get(Counter)
        pid = await world.pid()
        waiting = asyncio.create_task(other_leases.get(Counter))
        await until(lambda: shared_manager.pool_metrics()[0].waiting == 1)
        ray.kill(ray.get_actor(shared_manager.name, namespace="agentfly"))
        with pytest.raises(EnvironmentFault, match=f"the manager '{shared_manager.name}' cannot be reached: "):
            await waiting
        await until(lambda: not alive(pid))
        with pytest.raises(EnvironmentFault, match="Counter on node"):
            await world.press(1)
    async with shared_manager.leases(TASK, [Counter]) as leases:
        assert await (await leases.get(Counter)).pid() != pid
    await shared_manager.close()


async def test_clients_of_a_shared_manager_must_agree(shared_manager: RayManager) -> None:
    await shared_manager.warm_up([Counter])
    other = RayManager(shared_manager.name, {Counter: Pool(max_instances=2)})
    with pytest.raises(ConfigError, match="another pool here"):
        await other.warm_up([Counter])
    await other.close()
    with pytest.raises(ConfigError, match="instances=3 is asked of a manager that was made with instances=None"):
        await RayManager(shared_manager.name, instances=3).warm_up([Counter])
    with pytest.raises(ConfigError, match="Counter has the runtime 'process'"):
        RayManager(shared_manager.name, {Counter: Pool(runtime="process")}).pool(Counter)
    with pytest.raises(ConfigError, match="cannot take turns"):
        RayManager(shared_manager.name, {Counter: Pool(scope=Scope.GLOBAL)}).pool(Counter)
    with pytest.raises(ConfigError, match="known by a name"):
        RayManager({Counter: ONE})  # type: ignore[arg-type]


async def test_global_instance(cluster: Any) -> None:
    pools = {Counter: Pool(scope=Scope.GLOBAL, concurrent=True)}
    managers = [RayManager("everybody", pools) for _ in range(2)]
    async with managers[0].leases(TASK, [Counter]) as one, managers[1].leases(TASK, [Counter]) as two:
        await (await one.get(Counter)).press(7)
        assert (await two.get(Counter)).shown == 7
    for manager in managers:
        await manager.close()


def roll(manager: RayManager, chains: int) -> list[tuple[str, float]]:
    """A run in another process."""

    async def run() -> list[tuple[str, float]]:
        agent = byte_agent([call("press", times=7), "done"], tools=[Counter.press], reward=shows_seven, manager=manager)
        result = await agent.run(messages=TASK.messages, num_chains=chains)
        await manager.close()
        return [(chain.stop.value, chain.reward) for chain in result.trajectories]

    return asyncio.run(run())


async def test_rollouts_in_several_processes_share_one_manager(cluster: Any) -> None:
    manager = RayManager("rollouts", {Counter: Pool(max_instances=2)}, instances=2)
    await manager.warm_up([Counter])
    rolling = ray.remote(roll).options(num_cpus=0.5, scheduling_strategy="SPREAD")
    for run in await asyncio.gather(*[rolling.remote(manager, 8) for _ in range(2)]):
        assert run == [(StopReason.ANSWER.value, 1.0)] * 8
    [figures] = manager.pool_metrics()
    assert (figures.leased, figures.total_leases) == (0, 16)
    assert figures.started <= 2
    await manager.close()


# ── the death of a node ──


def hold(manager: RayManager) -> None:
    """Another process, which never gives back what it has."""

    async def run() -> None:
        async with manager.leases(TASK, [Counter]) as leases:
            await (await leases.get(Counter)).sleep(600)

    asyncio.run(run())


async def test_chains_survive_the_loss_of_a_node(cluster: Any) -> None:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as OnNode

    node = cluster.add_node(num_cpus=4, **SMALL)
    manager = RayManager("outlives", {Counter: Pool(max_instances=7, runtime=RayRuntime(num_cpus=0.5))})
    await manager.warm_up([Counter])
    options = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": OnNode(node.node_id, soft=False)}
    holding = ray.remote(hold).options(**options).remote(manager)
    await until(lambda: [pool.leased for pool in manager.pool_metrics()] == [1])
    seen: dict[int, str] = {}
    died = asyncio.Event()

    @tool
    async def press_later(env: Counter, times: int) -> str:
        """Press the button once the node has died."""
        seen[await env.pid()] = await env.node()
        await died.wait()
        return await env.press(times)

    async def kill_the_node() -> None:
        await until(lambda: len(seen) == 6)
        await asyncio.to_thread(cluster.remove_node, node, allow_graceful=False)
        await until(lambda: not any(alive(pid) for pid, where in seen.items() if where == node.node_id))
        died.set()

    agent = byte_agent([call("press_later", times=7), "done"], tools=[press_later], reward=shows_seven, manager=manager)
    killing = asyncio.create_task(kill_the_node())
    result = await agent.run(messages=TASK.messages, num_chains=12)
    await killing
    assert len(set(seen.values())) == 3
    assert [(chain.stop, chain.reward) for chain in result.trajectories] == [(StopReason.ANSWER, 1.0)] * 12
    faults = [failure.message for trajectory in result.trajectories for failure in trajectory.failures]
    assert len(faults) == list(seen.values()).count(node.node_id) > 0
    assert all(f"({node.node_id[:8]}) is lost" in fault for fault in faults)
    await until(lambda: [(pool.leased, pool.evicted) for pool in manager.pool_metrics()] == [(0, len(faults) + 1)])
    with pytest.raises(ray.exceptions.RayError):
        await holding
    await manager.close()


async def test_no_manager_outlives_its_clients(cluster: Any) -> None:
    closed, dropped = RayManager("kept"), RayManager("kept")
    for manager in (closed, dropped):
        await manager.warm_up([])
    await closed.close()
    await asyncio.sleep(LINGER + 1)
    assert "kept" in names()
    del dropped, manager
    gc.collect()
    await until(lambda: "kept" not in names())


def names() -> list[str]:
    return [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
