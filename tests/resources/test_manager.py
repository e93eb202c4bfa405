"""Leases, pools, queues and eviction: one instance per chain, no waiting while holding, nothing leaked."""

import asyncio
import random
import re
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from agentfly import Environment, Pool, Task
from agentfly.environment import InstanceHandle
from agentfly.errors import ConfigError, EnvironmentFault
from agentfly.resources import PoolMetrics, QueueTimeout, ResourceManager, allocator
from agentfly.resources import pool as pool_module

TASK = Task.of("Q")
QUICK = Pool(start_timeout=0.05, reset_timeout=0.05)


class World(Environment):
    """Writes down what was done to it; a method named in `breaks` fails, one in `hangs` never ends."""

    pool = QUICK
    log: ClassVar[list[str]] = []
    breaks: ClassVar[set[str]] = set()
    hangs: ClassVar[set[str]] = set()

    async def _do(self, what: str) -> None:
        self.log.append(what)
        if what in self.breaks:
            raise OSError(f"{what} broke")
        if what in self.hangs:
            await asyncio.sleep(60)

    async def start(self) -> None:
        await self._do("start")

    async def reset(self, task: Task) -> None:
        self.task = task
        await self._do("reset")

    async def check(self) -> None:
        await self._do("check")

    async def close(self) -> None:
        await asyncio.sleep(0)
        await self._do("close")


class Second(World):
    pass


@pytest.fixture(autouse=True)
async def _clean(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    World.log.clear()
    World.breaks.clear()
    World.hangs.clear()
    monkeypatch.setattr(pool_module, "BACKOFF", 0.001)
    yield
    assert [task for task in asyncio.all_tasks() if "allocator.py" in repr(task)] == []


@pytest.fixture
async def manager() -> AsyncIterator[ResourceManager]:
    manager = ResourceManager()
    yield manager
    await manager.close()
    assert manager.num_instances == 0


def make_manager(kind: type[Environment], **pool: Any) -> ResourceManager:
    return ResourceManager({kind: replace(kind.pool, **pool)})


def only(manager: ResourceManager) -> PoolMetrics:
    (figures,) = manager.pool_metrics()
    return figures


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


# ── leases ──


async def test_each_chain_has_its_own_instance(manager: ResourceManager) -> None:
    plan = [World, Second]
    async with manager.leases(TASK, plan) as leases, manager.leases(TASK, plan) as other_leases:
        first, again, also = await asyncio.gather(leases.get(World), leases.get(World), leases.get(World))
        assert first is again is also
        assert first.task is TASK
        assert await other_leases.get(World) is not first
        assert await leases.get(Second) is not first
        assert manager.num_instances == 4
    assert [pool.warm for pool in manager.pool_metrics()] == [2, 2]


async def test_no_instance_without_a_request(manager: ResourceManager) -> None:
    async with manager.leases(TASK, [World]):
        pass
    assert (World.log, manager.num_instances) == ([], 0)


async def test_environment_outside_the_plan_is_rejected(manager: ResourceManager) -> None:
    async with manager.leases(TASK, [World]) as leases:
        with pytest.raises(ConfigError, match="this chain has World; Second would have to be in the plan"):
            await leases.get(Second)


@pytest.mark.parametrize("error", [ZeroDivisionError, EnvironmentFault, asyncio.CancelledError])
async def test_instance_is_released_however_the_chain_ends(
    manager: ResourceManager, error: type[BaseException]
) -> None:
    async def chain() -> None:
        async with manager.leases(TASK, [World]) as leases:
            await leases.get(World)
            raise error

    with pytest.raises(error):
        await chain()
    assert (only(manager).leased, only(manager).warm) == (0, 1)


async def test_released_instance_is_reset_and_reused(manager: ResourceManager) -> None:
    seen = []
    for question in ("one", "two"):
        async with manager.leases(Task.of(question), [World]) as leases:
            seen.append(await leases.get(World))
            assert seen[-1].task.question == question
    assert seen[0] is seen[1]
    assert World.log == ["start", "reset", "reset"]


@pytest.mark.parametrize("error", [EnvironmentFault("dead"), asyncio.CancelledError()])
async def test_instance_is_evicted_after_fault_or_cancellation(manager: ResourceManager, error: BaseException) -> None:
    async def fail(_: Any) -> None:
        raise error

    async with manager.leases(TASK, [World]) as leases:
        with pytest.raises(type(error)):
            await leases.act([World], fail)
        first = await leases.get(World)
    async with manager.leases(TASK, [World]) as leases:
        assert await leases.get(World) is not first
    assert (only(manager).evicted, only(manager).started) == (1, 2)


async def test_plain_methods_run_in_threads(manager: ResourceManager) -> None:
    where: list[str] = []

    class Plain(Environment):
        def start(self) -> None:  # type: ignore[override]
            where.append(threading.current_thread().name)

        def reset(self, task: Task) -> None:  # type: ignore[override]
            where.append(task.question)

        def close(self) -> Any:
            where.append("closed")

    async with manager.leases(TASK) as leases:
        await leases.get(Plain)
    await manager.close()
    assert where[1:] == ["Q", "closed"]
    assert where[0] != threading.main_thread().name


# ── what breaks ──


async def test_failed_reset_is_a_fault_and_releases_everything(manager: ResourceManager) -> None:
    World.breaks.add("reset")
    async with manager.leases(TASK, [Second, World]) as leases:
        with pytest.raises(EnvironmentFault, match=r"Second\.reset failed: OSError: reset broke"):
            await leases.get(World)
        World.breaks.clear()
        assert isinstance(await leases.get(World), World)
    assert {pool.environment: pool.evicted for pool in manager.pool_metrics()} == {"World": 0, "Second": 1}


async def test_reset_timeout_is_a_fault(manager: ResourceManager) -> None:
    World.hangs.add("reset")
    async with manager.leases(TASK, [World]) as leases:
        with pytest.raises(EnvironmentFault, match=r"World\.reset took longer than 0\.05 s"):
            await leases.get(World)


async def test_failed_start_is_retried(manager: ResourceManager) -> None:
    class Hasty(World):
        async def start(self) -> None:
            await super().start()
            if self.log.count("start") == 1:
                raise OSError("not yet")

    async with manager.leases(TASK, [Hasty]) as leases:
        assert isinstance(await leases.get(Hasty), Hasty)
    assert (only(manager).failed_starts, only(manager).broken) == (1, "")


@pytest.mark.parametrize(
    ("how", "reason"),
    [("breaks", r"World\.start failed: OSError: start broke"), ("hangs", r"World\.start took longer than 0\.05 s")],
)
async def test_repeated_start_failures_fail_the_chains_with_the_reason(
    manager: ResourceManager, how: str, reason: str
) -> None:
    getattr(World, how).add("start")

    async def chain() -> None:
        async with manager.leases(TASK, [World]) as leases:
            await leases.get(World)

    errors = await asyncio.gather(*(chain() for _ in range(20)), return_exceptions=True)
    assert {type(error) for error in errors} == {EnvironmentFault}
    assert str(errors[0]).startswith("no World can be started: 3 starts failed, the last with: World.start")
    starts = World.log.count("start")
    with pytest.raises(EnvironmentFault, match=reason):
        await chain()
    assert World.log.count("start") == starts  # no further start was tried
    assert "no World can be started" in only(manager).broken


async def test_broken_environment_is_retried_after_cool_down(
    manager: ResourceManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "COOL_DOWN", 0.02)
    World.breaks.add("start")
    async with manager.leases(TASK, [World]) as leases:
        with pytest.raises(EnvironmentFault):
            await leases.get(World)
        World.breaks.clear()
        await asyncio.sleep(0.03)
        assert isinstance(await leases.get(World), World)
    assert only(manager).broken == ""


async def test_config_error_is_not_retried(manager: ResourceManager) -> None:
    class Needy(Environment):
        async def start(self) -> None:
            World.log.append("start")
            raise ConfigError("install bubblewrap")

    async with manager.leases(TASK, [Needy]) as leases:
        with pytest.raises(EnvironmentFault, match=r"no Needy can be started: Needy\.start failed: .*install bubble"):
            await leases.get(Needy)
    assert World.log == ["start"]


async def test_constructor_error_is_an_environment_fault(manager: ResourceManager) -> None:
    class Odd(Environment):
        def __init__(self) -> None:
            raise ValueError("odd")

    async with manager.leases(TASK, [Odd]) as leases:
        with pytest.raises(EnvironmentFault, match=r"Odd\(\) failed: ValueError: odd"):
            await leases.get(Odd)
    assert manager.num_instances == 0


@pytest.mark.parametrize("how", ["breaks", "hangs"])
async def test_failed_close_is_logged_and_abandoned(
    manager: ResourceManager, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    getattr(World, how).add("close")
    async with manager.leases(TASK, [World]) as leases:
        await leases.get(World)
    figures = manager.pool_metrics
    await manager.close()
    assert "World.close" in caplog.text
    assert (manager.num_instances, figures()) == (0, [])


async def test_timeout_error_of_the_environment_is_reported_unchanged(manager: ResourceManager) -> None:
    class Remote(Environment):
        async def reset(self, task: Task) -> None:
            raise TimeoutError("no answer from port 7")

    async with manager.leases(TASK) as leases:
        with pytest.raises(EnvironmentFault, match=r"Remote\.reset failed: TimeoutError: no answer from port 7"):
            await leases.get(Remote)


async def test_unhealthy_idle_instance_is_replaced(manager: ResourceManager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator, "CHECK_AFTER", -1.0)
    async with manager.leases(TASK, [World]) as leases:
        first = await leases.get(World)

    class Fickle:
        def __contains__(self, what: object) -> bool:
            return what == "check" and World.log.count("check") < 3

    monkeypatch.setattr(World, "breaks", Fickle())
    async with manager.leases(TASK, [World]) as leases:
        assert await leases.get(World) is not first
    assert (World.log.count("check"), only(manager).evicted) == (3, 1)


async def test_concurrent_failed_starts_count_once(manager: ResourceManager) -> None:
    class Hasty(World):
        async def start(self) -> None:
            await super().start()
            if len(self.log) <= 8:
                raise OSError("not yet")

    many = [manager.leases(TASK, [Hasty]) for _ in range(8)]
    await asyncio.gather(*(leases.get(Hasty) for leases in many))
    assert only(manager).failed_starts == 8
    await asyncio.gather(*(leases.release() for leases in many))


# ── pools ──


async def test_min_warm_instances_are_started_and_refilled() -> None:
    manager = make_manager(World, min_warm=2, max_instances=4)
    await manager.warm_up([World])
    await until(lambda: only(manager).warm == 2)
    async with manager.leases(TASK, [World]) as leases:
        await leases.get(World)
        await until(lambda: only(manager).warm == 2)
        assert (only(manager).leased, manager.num_instances) == (1, 3)
    await manager.close()


async def test_idle_instances_beyond_min_warm_are_closed() -> None:
    manager = make_manager(World, min_warm=1, idle_seconds=0.03)
    async with manager.leases(TASK, [World]) as one, manager.leases(TASK, [World]) as two:
        await one.get(World)
        await two.get(World)
    await until(lambda: only(manager).warm == 1 and manager.num_instances == 1)
    await asyncio.sleep(0.1)
    assert only(manager).warm == 1
    await manager.close()


async def test_max_uses() -> None:
    manager, seen = make_manager(World, max_uses=2), []
    for _ in range(5):
        async with manager.leases(TASK, [World]) as leases:
            seen.append(await leases.get(World))
    assert [seen[0] is seen[1], seen[1] is seen[2], seen[2] is seen[3], seen[3] is seen[4]] == [
        True,
        False,
        True,
        False,
    ]
    await manager.close()


async def test_recycle_replace() -> None:
    manager, seen = make_manager(World, recycle="replace"), []
    for _ in range(3):
        async with manager.leases(TASK, [World]) as leases:
            seen.append(await leases.get(World))
    assert len(set(map(id, seen))) == 3
    assert only(manager).evicted == 0  # nothing was wrong with them
    await manager.close()
    assert World.log.count("close") == 3


async def test_slow_start_does_not_block_released_instances() -> None:
    never = asyncio.Event()

    class Slow(World):
        pool = Pool(max_instances=2)
        starts = 0

        async def start(self) -> None:
            Slow.starts += 1
            if Slow.starts > 1:
                await never.wait()

    manager = ResourceManager()
    first = manager.leases(TASK, [Slow])
    await first.get(Slow)
    async with manager.leases(TASK, [Slow]) as leases:
        getting = asyncio.create_task(leases.get(Slow))
        await until(lambda: only(manager).starting == 1)
        await first.release()
        assert isinstance(await getting, Slow)
    await manager.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_warm": -1}, "min_warm must be a whole number of at least 0, not -1"),
        ({"max_instances": 0}, "max_instances must be a whole number of at least 1, not 0"),
        ({"max_uses": 1.5}, "max_uses must be a whole number of at least 1, not 1.5"),
        ({"wait_timeout": "long"}, "wait_timeout must be a number of at least 0, not 'long'"),
        ({"recycle": "burn"}, "recycle must be 'reset' or 'replace', not 'burn'"),
        ({"scope": "world"}, "scope must be 'chain' or 'group' or 'global', not 'world'"),
        ({"min_warm": 3, "max_instances": 2}, "cannot keep 3 warm with max_instances=2"),
        ({"concurrent": True}, "scope='group' or 'global' too"),
    ],
)
def test_invalid_pool_settings_are_rejected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Pool(**settings)


async def test_unknown_runtime_is_rejected(manager: ResourceManager) -> None:
    class Lost(Environment):
        pool = Pool(runtime="moon")

    async with manager.leases(TASK, [Lost]) as leases:
        with pytest.raises(ConfigError, match="there is no runtime 'moon'; use one of in_process, process,"):
            await leases.get(Lost)


# ── queueing ──


async def test_requests_wait_in_order() -> None:
    manager, order = make_manager(World, max_instances=1), []

    async def chain(number: int) -> None:
        async with manager.leases(TASK, [World]) as leases:
            await leases.get(World)
            order.append(number)
            await asyncio.sleep(0)

    await asyncio.gather(*(chain(number) for number in range(50)))
    assert order == list(range(50))
    assert only(manager).seconds["wait"]["count"] == 50
    await manager.close()


async def test_queue_timeout_names_queue_length_and_holders() -> None:
    manager = make_manager(World, max_instances=1, wait_timeout=0.02)
    async with manager.leases(Task.of("Long one", id="t7"), [World], chain="3/1") as holder:
        await holder.get(World)
        async with manager.leases(TASK, [World]) as one, manager.leases(TASK, [World]) as two:
            errors = await asyncio.gather(one.get(World), two.get(World), return_exceptions=True)
    assert [type(error) for error in errors] == [QueueTimeout, QueueTimeout]
    assert "no World was free within 0.02 s: 2 chains were waiting" in str(errors[0])
    assert re.search(r"1 of at most 1 are leased: to chain 3/1 \(t7\) for \d+\.\d s", str(errors[0]))
    assert only(manager).timeouts == 2
    await manager.close()


async def test_cancellation_while_waiting_leaks_nothing() -> None:
    manager = make_manager(World, max_instances=1)
    for late in (False, True):
        first, second = manager.leases(TASK, [World]), manager.leases(TASK, [World])
        await first.get(World)
        waiting = asyncio.create_task(second.get(World))
        await until(lambda: only(manager).waiting == 1)
        if late:
            await first.release()  # granted, and cancelled before it could be taken
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await first.release()
        assert (only(manager).leased, only(manager).waiting, only(manager).warm) == (0, 0, 1)
    await manager.close()


KINDS: list[type[World]] = [type(name, (World,), {"pool": Pool()}) for name in "ABCD"]
SETTINGS = st.fixed_dictionaries({
    "max_instances": st.integers(1, 3),
    "min_warm": st.integers(0, 1),
    "max_uses": st.sampled_from([None, 2]),
    "recycle": st.sampled_from(["reset", "replace"]),
    "scope": st.sampled_from(["chain", "chain", "group", "global"]),
    "memory": st.sampled_from([None, 100, 250]),
})  # fmt: skip
PLANS = st.lists(st.sets(st.integers(0, 3), min_size=1), min_size=2, max_size=30)
BUDGETS = st.sampled_from([{}, {"instances": 4}, {"memory": 1000}, {"instances": 5, "memory": 1100}])


@settings(
    max_examples=150,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(plans=PLANS, pools=st.tuples(*[SETTINGS] * 4), budget=BUDGETS, seed=st.integers(0, 9999))
@example(  # two chains of one group, each first in one of two queues
    plans=[{1, 2}, {1}, {0, 2, 3}, {1, 2}, {1, 2, 3}, {0, 1, 2, 3}, {2}, {0, 2, 3}, {0}, {0, 2}, {1, 3}, {0, 3}, {1},
           {2}, {1}, {0}, {0, 1, 2, 3}],
    pools=(
        {"memory": 250, "recycle": "replace", "min_warm": 1, "max_instances": 2},
        {"max_uses": 2, "max_instances": 3},
        {"scope": "group", "max_instances": 3, "recycle": "replace", "min_warm": 1, "max_uses": 2},
        {"max_uses": 2, "max_instances": 3},
    ),
    budget={"instances": 5, "memory": 1100},
    seed=448,
)  # fmt: skip
def test_no_deadlock_for_any_plan(
    plans: list[set[int]], pools: tuple[dict[str, Any], ...], budget: dict[str, int], seed: int
) -> None:
    """Chains that need several kinds of any scope, and die or are cancelled, under pools and budgets that are small."""
    draw = random.Random(seed)

    async def die(_: Any) -> None:
        raise EnvironmentFault("dead")

    async def run() -> None:
        manager = ResourceManager(dict(zip(KINDS, (Pool(**settings) for settings in pools), strict=True)), **budget)
        plan_of = [draw.choice(plans) for _ in range(3)]  # the chains of a group need the same
        groups = [manager.group() for _ in plan_of]

        async def chain(number: int) -> str:
            group = number % len(groups)
            kinds = draw.sample([KINDS[kind] for kind in sorted(plan_of[group])], len(plan_of[group]))
            async with manager.leases(TASK, kinds, group=groups[group]) as leases:
                for kind in kinds:
                    await leases.get(kind)
                    await asyncio.sleep(0)
                if draw.random() < 0.2:
                    await leases.act(kinds, die)
            return "well"

        chains = [asyncio.create_task(chain(number)) for number in range(len(plans))]
        left = [len(range(group, len(plans), len(groups))) for group in range(len(groups))]

        def count_end(number: int) -> None:
            left[number % len(groups)] -= 1
            if not left[number % len(groups)]:
                groups[number % len(groups)].close()

        for number, task in enumerate(chains):
            task.add_done_callback(lambda _, number=number: count_end(number))
        for _ in range(draw.randrange(8)):
            await asyncio.sleep(0)
        for task in draw.sample(chains, len(chains) // 5):
            task.cancel()
        async with asyncio.timeout(60):
            came = await asyncio.gather(*chains, return_exceptions=True)
        await asyncio.sleep(
            0
        )  # from Python 3.12 on, gather does not suspend if all are done: `count_end` has yet to run
        assert {type(outcome) for outcome in came} <= {str, EnvironmentFault, asyncio.CancelledError}
        assert [(pool.leased, pool.waiting) for pool in manager.pool_metrics() if pool.leased or pool.waiting] == []
        await manager.close()
        assert manager.num_instances == 0

    asyncio.run(run())


# ── the budget ──


async def test_request_beyond_the_budget_is_rejected() -> None:
    manager = ResourceManager(instances=1)
    async with manager.leases(TASK, [World, Second]) as leases:
        with pytest.raises(ConfigError, match="a chain needs World and Second; a budget of 1 instances has no room"):
            await leases.get(World)
    await manager.close()


async def test_memory_budget_uses_declared_memory() -> None:
    manager = ResourceManager({World: Pool(memory=400), Second: Pool(memory=500)}, memory=1000)
    async with manager.leases(TASK, [World, Second]) as leases:
        await leases.get(World)
        async with manager.leases(TASK, [World]) as other:
            waiting = asyncio.create_task(other.get(World))
            await asyncio.sleep(0.02)
            assert (waiting.done(), manager.num_instances) == (False, 2)
            await leases.release()
            assert isinstance(await waiting, World)
    await manager.close()


async def test_idle_instance_is_closed_for_another_environment() -> None:
    manager = ResourceManager(instances=1)
    for kind in (World, Second, World):
        async with manager.leases(TASK, [kind]) as leases:
            assert type(await leases.get(kind)) is kind
    await manager.close()


async def test_one_environment_cannot_starve_another() -> None:
    """Two hundred chains ask for World before ten ask for Second; the ten need not wait for the two hundred."""
    manager, ended = ResourceManager(instances=4), []

    async def chain(kind: type[World]) -> None:
        async with manager.leases(TASK, [kind]) as leases:
            await leases.get(kind)
            await asyncio.sleep(0.001)
        ended.append(kind)

    await asyncio.gather(*(chain(World) for _ in range(200)), *(chain(Second) for _ in range(10)))
    assert max(at for at, kind in enumerate(ended) if kind is Second) < 120
    await manager.close()


async def test_large_environment_is_not_starved() -> None:
    """Room for ten small ones or a single large one: the large one does not wait until no small one is requested."""
    pools = {World: Pool(memory=100, min_warm=1), Second: Pool(memory=950)}
    manager, ended = ResourceManager(pools, memory=1000), []

    async def chain(kind: type[World]) -> None:
        async with manager.leases(TASK, [kind]) as leases:
            await leases.get(kind)
            await asyncio.sleep(0.001)
        ended.append(kind)

    small = [chain(World) for _ in range(100)]
    await asyncio.gather(*small[:50], chain(Second), *small[50:])
    assert ended.index(Second) < 75
    await manager.close()


# ── sharing ──


class Board(World):
    """Counts those who act in it at the same time."""

    def __init__(self) -> None:
        self.acting = self.most = self.actions = 0

    async def act(self) -> None:
        self.acting += 1
        self.most = max(self.most, self.acting)
        await asyncio.sleep(0)
        self.acting -= 1
        self.actions += 1


@pytest.mark.parametrize("concurrent", [False, True])
async def test_global_instance_is_shared_and_serialized_unless_concurrent(
    concurrent: bool,
) -> None:
    manager, seen = make_manager(Board, scope="global", concurrent=concurrent), set()

    async def chain() -> None:
        async with manager.leases(TASK, [Board, World]) as leases:
            seen.add(await leases.get(Board))
            await leases.act([Board], lambda lent: lent[Board].act())  # type: ignore[attr-defined]

    await asyncio.gather(*(chain() for _ in range(20)))
    (board,) = seen
    assert (board.actions, board.most > 1) == (20, concurrent)
    assert World.log.count("reset") == 20  # of the worlds: what is everybody's is never reset
    await manager.close()
    assert manager.num_instances == 0


async def test_cancelled_chain_does_not_evict_a_concurrent_instance() -> None:
    manager = make_manager(Board, scope="global", concurrent=True)

    async def hang(_: Any) -> None:
        await asyncio.sleep(60)

    async with manager.leases(TASK, [Board]) as one, manager.leases(TASK, [Board]) as two:
        board = await one.get(Board)
        given_up = asyncio.create_task(two.act([Board], hang))
        await asyncio.sleep(0.01)
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        async with manager.leases(TASK, [Board]) as three:
            assert await three.get(Board) is board
    assert (only(manager).evicted, only(manager).started) == (0, 1)
    await manager.close()


async def test_dead_global_instance_is_replaced_while_still_leased() -> None:
    manager = make_manager(Board, scope="global")

    async def die(_: Any) -> None:
        raise EnvironmentFault("dead")

    async with manager.leases(TASK, [Board]) as one, manager.leases(TASK, [Board]) as two:
        first = await one.get(Board)
        assert await two.get(Board) is first
        with pytest.raises(EnvironmentFault):
            await one.act([Board], die)
        await one.release()
        async with manager.leases(TASK, [Board]) as three:
            assert await three.get(Board) is not first
        assert only(manager).evicted == 0
    assert only(manager).evicted == 1
    await manager.close()


async def test_group_scope_is_shared_within_a_group_only() -> None:
    manager = make_manager(Board, scope="group")
    groups, seen = [manager.group(), manager.group()], []

    async def chain(number: int) -> None:
        async with manager.leases(TASK, [World, Board], group=groups[number % 2]) as leases:
            seen.append((number % 2, await leases.get(Board)))
            await leases.act([Board], lambda lent: lent[Board].act())  # type: ignore[attr-defined]

    await asyncio.gather(*(chain(number) for number in range(8)))
    first, second = ({board for number, board in seen if number == group} for group in (0, 1))
    assert len(first) == len(second) == 1
    assert first != second
    assert {pool.environment: pool.leased for pool in manager.pool_metrics()} == {"World": 0, "Board": 2}
    for group in groups:
        group.close()
    assert {pool.environment: pool.warm for pool in manager.pool_metrics()}["Board"] == 2
    await manager.close()


async def test_dead_group_instance_is_replaced_after_last_user() -> None:
    manager = make_manager(Board, scope="group")
    group = manager.group()

    async def die(_: Any) -> None:
        raise EnvironmentFault("dead")

    async with manager.leases(TASK, [Board], group=group) as one, manager.leases(TASK, [Board], group=group) as two:
        first = await one.get(Board)
        assert await two.get(Board) is first
        with pytest.raises(EnvironmentFault):
            await one.act([Board], die)
        await one.release()
        again = asyncio.create_task(one.get(Board))
        await asyncio.sleep(0.01)
        assert not again.done()
        await two.release()
        assert await again is not first
    group.close()
    await manager.close()


async def test_group_scope_without_group_is_rejected(manager: ResourceManager) -> None:
    class Shared(Environment):
        pool = Pool(scope="group")  # type: ignore[arg-type]

    async with manager.leases(TASK, [Shared]) as leases:
        with pytest.raises(ConfigError, match="Shared is shared by a group, and this chain belongs to none"):
            await leases.get(Shared)


async def test_dead_global_instance_is_replaced_for_multi_pool_request() -> None:
    manager = ResourceManager({Board: Pool(scope="global"), World: Pool(max_instances=1)})  # type: ignore[arg-type]

    async def die(_: Any) -> None:
        raise EnvironmentFault("dead")

    async with manager.leases(TASK, [Board]) as other, manager.leases(TASK, [World]) as busy:
        await other.get(Board)
        await busy.get(World)
        async with manager.leases(TASK, [World, Board]) as leases:
            waiting = asyncio.create_task(leases.get(World))
            await until(lambda: [pool.waiting for pool in manager.pool_metrics()] == [1, 1])
            async with manager.leases(TASK, [Board]) as unlucky:
                with pytest.raises(EnvironmentFault):
                    await unlucky.act([Board], die)
            assert {pool.environment: pool.starting for pool in manager.pool_metrics()} == {"Board": 1, "World": 0}
            await busy.release()
            await waiting
    await manager.close()


async def test_chains_of_a_group_acquire_their_own_instances_concurrently() -> None:
    manager, together = make_manager(Board, scope="group"), asyncio.Barrier(3)
    group = manager.group()

    class Own(Environment):
        async def reset(self, task: Task) -> None:
            if task.id:
                await together.wait()

    async def chain(name: str) -> None:
        async with manager.leases(Task.of("Q", id=name), [Board, Own], group=group) as leases:
            await leases.get(Own)

    await chain("")
    async with asyncio.timeout(60):
        await asyncio.gather(*map(chain, "abc"))
    group.close()
    await manager.close()


async def test_waiting_for_the_group_has_a_timeout() -> None:
    manager = make_manager(Board, scope="group", wait_timeout=0.5, reset_timeout=60.0)
    group = manager.group()
    World.hangs.add("reset")
    first = asyncio.create_task(manager.leases(TASK, [Board], group=group).get(Board))
    await until(lambda: "reset" in World.log)
    async with asyncio.timeout(60):
        with pytest.raises(QueueTimeout, match="another chain of its group still waits for it"):
            await manager.leases(TASK, [Board], group=group).get(Board)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await manager.close()


async def test_chains_of_a_group_must_share_the_same_environments() -> None:
    shared = Pool(scope="group")  # type: ignore[arg-type]
    manager = ResourceManager({World: shared, Second: shared})
    group = manager.group()
    async with manager.leases(TASK, [World], group=group) as one, manager.leases(TASK, [Second], group=group) as two:
        await one.get(World)
        with pytest.raises(ConfigError, match="share the same environments; the first had no Second"):
            await two.get(Second)
    group.close()
    await manager.close()


# ── the end ──


def test_loop_shutdown_closes_idle_leased_and_starting_instances() -> None:
    manager, started = ResourceManager(), asyncio.Event()

    class Slow(Second):
        pool = Pool()

        async def start(self) -> None:
            started.set()
            await asyncio.sleep(60)

    async def run() -> None:
        async with manager.leases(TASK, [World]) as leases:
            await leases.get(World)
        await manager.leases(TASK, [Second]).get(Second)
        slow = asyncio.create_task(manager.leases(TASK, [Slow]).get(Slow))
        await started.wait()
        assert (manager.num_instances, slow.done()) == (3, False)

    asyncio.run(run())
    assert World.log.count("close") == 3
    assert manager.num_instances == 0


def test_close_interrupted_by_loop_shutdown_is_repeated() -> None:
    manager, closing, closed = make_manager(World, recycle="replace", reset_timeout=5.0), asyncio.Event(), []

    class Slow(Environment):
        pool = Pool(recycle="replace")  # type: ignore[arg-type]

        async def close(self) -> None:
            closing.set()
            await asyncio.sleep(0.02)
            closed.append(self)

    async def run() -> None:
        async with manager.leases(TASK, [Slow]) as leases:
            await leases.get(Slow)
        await closing.wait()

    asyncio.run(run())
    assert (len(closed), manager.num_instances) == (1, 0)


async def test_close_fails_waiting_requests(manager: ResourceManager) -> None:
    World.hangs.add("start")
    async with manager.leases(TASK, [World]) as leases:
        getting = asyncio.create_task(leases.get(World))
        await until(lambda: World.log == ["start"])
        await manager.close()
        with pytest.raises(EnvironmentFault, match="this manager is closed"):
            await getting


async def test_close_fails_requests_behind_others() -> None:
    """The head of the queue wants something else besides, and what those behind him want is ready."""
    manager = ResourceManager({World: Pool(max_instances=1), Second: Pool(max_instances=1)})
    holder = manager.leases(TASK, [Second])
    await holder.get(Second)
    async with manager.leases(TASK, [World]) as leases:
        await leases.get(World)
    waiting = [asyncio.create_task(manager.leases(TASK, plan).get(World)) for plan in ([World, Second], [World])]
    await until(lambda: sum(pool.waiting for pool in manager.pool_metrics()) == 3)
    await manager.close()
    errors = await asyncio.gather(*waiting, return_exceptions=True)
    assert [str(error) for error in errors] == ["this manager is closed"] * 2


async def test_close_during_health_check_fails_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator, "CHECK_AFTER", -1.0)
    manager, checking, closed = ResourceManager(), asyncio.Event(), asyncio.Event()

    class Checked(Environment):
        async def check(self) -> None:
            checking.set()
            await closed.wait()
            raise OSError("it is closed")

        async def close(self) -> None:
            closed.set()

    getting = asyncio.create_task(manager.leases(TASK, [Checked]).get(Checked))
    await checking.wait()
    await manager.close()
    with pytest.raises(EnvironmentFault, match="this manager is closed"):
        await getting


def test_cancelled_close_finishes_at_loop_shutdown() -> None:
    manager = ResourceManager()

    async def run() -> None:
        await manager.leases(TASK, [World]).get(World)
        closing = asyncio.create_task(manager.close())
        while "close" not in World.log:
            await asyncio.sleep(0)
        closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)
        assert manager.num_instances == 1
        World.hangs.clear()

    World.hangs.add("close")
    asyncio.run(run())
    assert (World.log.count("close"), manager.num_instances) == (2, 0)


def test_start_cancelled_before_first_step_is_not_counted() -> None:
    manager, warming = ResourceManager(), []

    class Warm(Environment):
        pool = Pool(min_warm=1)

    async def run() -> None:
        warming.append(asyncio.create_task(manager.warm_up([Warm])))

    asyncio.run(run())
    assert manager.num_instances == 0


async def test_manager_is_reusable_after_close(manager: ResourceManager) -> None:
    for _ in range(2):
        async with manager.leases(TASK, [World]) as leases:
            await leases.get(World)
        await manager.close()
    assert World.log.count("close") == 2


async def test_pool_metrics_as_scalars() -> None:
    manager = make_manager(World, max_instances=1)
    async with manager.leases(TASK, [World]) as leases, manager.leases(TASK, [World]) as other_leases:
        await leases.act([World], lambda lent: lent[World]._do("act"))  # type: ignore[attr-defined]
        waiting = asyncio.create_task(other_leases.get(World))
        await until(lambda: only(manager).waiting == 1)
        metrics = manager.metrics()
        assert {name: metrics[f"World/{name}"] for name in ("leased", "waiting", "warm", "starting", "evicted")} == {
            "leased": 1, "waiting": 1, "warm": 0, "starting": 0, "evicted": 0,
        }  # fmt: skip
        assert all(metrics[f"World/{name}_max"] > 0 for name in ("start", "reset", "step"))
        await leases.release()
        await waiting
    assert manager.metrics()["World/wait_max"] > 0
    await manager.close()


# ── places ──


class Bed(InstanceHandle):
    log: ClassVar[list[str]] = []
    dead = ""

    def exit_reason(self) -> str | None:
        return self.dead or None

    def memory(self) -> int:
        return 1000

    async def pause(self) -> None:
        self.log.append("pause")

    async def resume(self) -> None:
        self.log.append("resume")

    async def terminate(self) -> None:
        self.log.append("terminate")


class Hotel:
    name = "hotel"
    max_instances: int | None = 3

    def __init__(self) -> None:
        self.beds: list[Bed] = []

    async def create(self, kind: type[Environment]) -> InstanceHandle:
        self.beds.append(Bed(kind()))
        return self.beds[-1]


async def test_idle_instance_is_paused_resumed_and_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator, "PAUSE_AFTER", 0.01)
    Bed.log.clear()
    manager = make_manager(World, runtime=Hotel())
    for _ in range(2):
        async with manager.leases(TASK, [World]) as leases:
            await leases.get(World)
        pauses = Bed.log.count("pause") + 1
        await until(lambda pauses=pauses: Bed.log.count("pause") == pauses)
    assert (only(manager).max_instances, only(manager).memory, only(manager).runtime) == (3, 1000, "hotel")
    await manager.close()
    assert Bed.log == ["pause", "resume", "pause", "terminate"]


async def test_instance_that_died_while_idle_is_evicted() -> None:
    hotel = Hotel()
    manager = make_manager(World, runtime=hotel)
    async with manager.leases(TASK, [World]) as leases:
        first = await leases.get(World)
    hotel.beds[0].dead = "killed by signal 9"
    async with manager.leases(TASK, [World]) as leases:
        assert await leases.get(World) is not first
    assert only(manager).evicted == 1
    await manager.close()


class Sleeper(Bed):
    """Hangs or breaks when it is paused or resumed."""

    broken = ""

    async def pause(self) -> None:
        await super().pause()
        if self.broken == "pause":
            await asyncio.sleep(60)

    async def resume(self) -> None:
        await asyncio.sleep(0.01)
        if self.broken == "resume":
            raise OSError("it does not resume")
        await super().resume()


class Hostel(Hotel):
    async def create(self, kind: type[Environment]) -> InstanceHandle:
        self.beds.append(Sleeper(kind()))
        return self.beds[-1]


async def pause_instance(manager: ResourceManager, hostel: Hostel, broken: str) -> Environment:
    """An instance that has been leased once and was then paused."""
    Bed.log.clear()
    async with manager.leases(TASK, [World]) as leases:
        first = await leases.get(World)
    for bed in hostel.beds:
        bed.broken = broken  # type: ignore[attr-defined]
    await until(lambda: Bed.log == ["pause"])
    return first


@pytest.mark.parametrize("broken", ["pause", "resume"])
async def test_instance_that_cannot_pause_or_resume_is_evicted(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    monkeypatch.setattr(allocator, "PAUSE_AFTER", 0.01)
    hostel = Hostel()
    manager = make_manager(World, runtime=hostel, reset_timeout=0.05, idle_seconds=60.0)
    first = await pause_instance(manager, hostel, broken)
    monkeypatch.setattr(allocator, "PAUSE_AFTER", 60.0)
    async with manager.leases(TASK, [World]) as leases, asyncio.timeout(60):
        assert await leases.get(World) is not first
    assert only(manager).evicted == 1
    await manager.close()


@pytest.mark.parametrize("broken", ["", "resume"])
async def test_shared_instance_is_resumed_once(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    monkeypatch.setattr(allocator, "PAUSE_AFTER", 0.01)
    hostel = Hostel()
    manager = make_manager(
        World, runtime=hostel, scope="global", concurrent=True, reset_timeout=60.0, idle_seconds=60.0
    )
    first = await pause_instance(manager, hostel, broken)
    monkeypatch.setattr(allocator, "PAUSE_AFTER", 60.0)

    async def chain(name: str) -> bool:
        async with manager.leases(TASK, [World], chain=name) as leases:
            return await leases.get(World) is first

    assert await asyncio.gather(*map(chain, "abc")) == [not broken] * 3
    assert (only(manager).leased, only(manager).warm, only(manager).evicted) == (0, 1, bool(broken))
    assert Bed.log.count("resume") == (not broken)
    await manager.close()
