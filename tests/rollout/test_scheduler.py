"""Many chains at once: order, limits, isolation, retries, cancellation, seeds."""

import asyncio
import gc
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import pytest

from agentfly import Environment, Task, reward, tool
from agentfly.agents import BaseAgent
from agentfly.backends.base import Request
from agentfly.backends.scripted import ScriptedBackend, ScriptedTurn
from agentfly.errors import BackendFault, ConfigError, EnvironmentFault, TemplateError
from agentfly.resources import ResourceManager
from agentfly.rollout.events import ChainEnded, ChainRetried, ChainStarted, Event
from agentfly.trajectory import FailureKind, StopReason, TrainingTreatment
from agentfly.types import Completion, Message, Reply
from tests.fakes import Computed, Recording, byte_agent, call, random_from

QUESTIONS = [{"question": f"Question {i}", "answer": i} for i in range(4)]


@tool
async def add(a: int, b: int) -> str:
    """Add two integers."""
    return str(a + b)


def reply_at_random(turn: ScriptedTurn) -> str:
    """A chain of one to four turns, by its seed."""
    return call("add", a=turn.random.randrange(100), b=1) if turn.random.random() < 0.6 else str(turn.random.random())


def random_latency(salt: int) -> Callable[[Request], float]:
    return lambda request: random_from(salt, request.chain, request.turn).random() * 0.004


# ── order, groups, concurrency ──


async def test_results_are_ordered_by_task_and_chain() -> None:
    finished: list[tuple[int, int]] = []

    def watch(event: Event) -> None:
        if isinstance(event, ChainEnded):
            finished.append((event.group, event.chain))

    agent = byte_agent(
        ScriptedBackend("done", latency=lambda r: 0.02 - 0.002 * int(r.chain[0]) - 0.001 * int(r.chain[2]))
    )
    result = await agent.run(QUESTIONS, num_chains=3, observer=watch)
    order = [(t.group, t.chain) for t in result]
    assert order == [(g, c) for g in range(4) for c in range(3)]
    assert finished != order
    assert [[t.task.columns["answer"] for t in group] for group in result.groups] == [[i] * 3 for i in range(4)]
    assert agent.trajectories == result.trajectories


async def test_num_chains_defaults_to_one_and_columns_stay_with_their_task() -> None:
    result = await byte_agent("ok").run(QUESTIONS)
    assert [t.task.columns["question"] for t in result] == [q["question"] for q in QUESTIONS]
    assert [t.task.id for t in result] == ["0", "1", "2", "3"]


async def test_max_concurrent_chains_is_reached_and_never_exceeded() -> None:
    now, peak = 0, 0

    async def speak(turn: ScriptedTurn) -> str:
        nonlocal now, peak
        now, peak = now + 1, max(peak, now + 1)
        await asyncio.sleep(0.001)
        now -= 1
        return "ok"

    await byte_agent(speak).run(QUESTIONS, num_chains=5, max_concurrent_chains=3)
    assert peak == 3


async def test_chains_run_independently() -> None:
    """The second chain takes all its turns while the first one waits for its first: no lock-step."""
    gate = asyncio.Event()

    async def speak(turn: ScriptedTurn) -> str:
        if turn.chain == "0/0":
            await gate.wait()
            return "late"
        if turn.turn == 3:
            gate.set()
            return "early"
        return call("add", a=1, b=1)

    result = await asyncio.wait_for(byte_agent(speak, tools=[add]).run("Go.", num_chains=2), 60)
    assert [t.prediction for t in result] == ["late", "early"]


async def test_stateless_calls_of_one_turn_run_concurrently() -> None:
    barrier = asyncio.Barrier(3)

    @tool
    async def meet(n: int) -> str:
        """Wait for the others."""
        await barrier.wait()
        return str(n)

    agent = byte_agent(["\n".join(call("meet", n=n) for n in range(3)), "done"], tools=[meet])
    (trajectory,) = await asyncio.wait_for(agent.run("Go."), 60)
    assert [m.text for m in trajectory.messages if m.role == "tool"] == ["0", "1", "2"]


class Slate(Environment):
    """Keeps what happened, and notices two actions at once."""

    async def reset(self, task: Task) -> None:
        self.lines: list[str] = []
        self.busy = False

    @tool
    async def write(self, line: str) -> str:
        """Write a line."""
        assert not self.busy
        self.busy = True
        await asyncio.sleep(0)
        self.lines.append(line)
        self.busy = False
        return ",".join(self.lines)


class Board(Environment):
    @tool
    async def draw(self, line: str) -> str:
        """Draw a line."""
        return line


async def test_calls_to_one_environment_run_in_order() -> None:
    started = asyncio.Event()

    @tool
    async def wait_for_slate() -> str:
        """Wait until the slate was written on."""
        await started.wait()
        return "seen"

    @tool
    async def tell(slate: Slate) -> str:
        """Tell the waiting one."""
        started.set()
        return ",".join(slate.lines)

    calls = [call("wait_for_slate"), *(call("write", line=c) for c in "abc"), call("tell")]
    agent = byte_agent(["\n".join(calls), "done"], tools=[Slate, wait_for_slate, tell])
    (trajectory,) = await asyncio.wait_for(agent.run("Go."), 60)
    assert [m.text for m in trajectory.messages if m.role == "tool"] == ["seen", "a", "a,b", "a,b,c", "a,b,c"]


async def test_call_to_two_environments_keeps_its_order_in_both() -> None:
    log: list[str] = []

    @tool
    async def slate(name: str, on: Slate) -> str:
        """Act on the slate."""
        await asyncio.sleep(0.002)
        log.append(name)
        return name

    @tool
    async def board(name: str, on: Board) -> str:
        """Act on the board."""
        log.append(name)
        return name

    @tool
    async def both(name: str, one: Board, other: Slate) -> str:
        """Act on both."""
        log.append(name)
        return name

    calls = [call("slate", name="1"), call("both", name="2"), call("board", name="3")]
    await byte_agent(["\n".join(calls), "done"], tools=[slate, board, both]).run("Go.")
    assert log == ["1", "2", "3"]


# ── one bad chain ──


async def test_failed_chain_has_a_typed_stop_reason_and_does_not_end_the_run() -> None:
    class Fragile(BaseAgent):
        def parse(self, text: str) -> Reply:
            if text == "boom":
                raise RuntimeError("cannot read this")
            return Reply(Message("assistant", text))

    agent = Fragile("bytes", template="chatml", backend=ScriptedBackend(lambda t: "boom" if t.chain == "1/0" else "ok"))
    result = await agent.run(QUESTIONS)
    assert [t.stop for t in result] == [StopReason.ANSWER, StopReason.AGENT_FAULT, StopReason.ANSWER, StopReason.ANSWER]
    assert result[1].treatment is TrainingTreatment.MASK
    assert result.metrics["failure/agent"] == 1
    assert result.metrics["stop/agent_fault"] == 1


async def test_config_error_ends_the_run() -> None:
    def complete(request: Request) -> Completion:
        raise ConfigError("min_p is not for me")

    with pytest.raises(ConfigError, match="min_p"):
        await byte_agent(Computed(complete)).run(QUESTIONS)


async def test_template_error_is_raised_before_the_first_token() -> None:
    backend = Recording("never")
    agent = byte_agent(backend)

    def refuse(messages: Any) -> Any:
        raise TemplateError("roles must alternate")

    assert agent.template is not None
    agent.template.start = refuse  # type: ignore[method-assign]
    with pytest.raises(TemplateError):
        await agent.run(QUESTIONS)
    assert backend.requests == []


async def test_a_task_that_cannot_be_rendered_fails_alone() -> None:
    agent = byte_agent("ok")
    assert agent.template is not None
    start = agent.template.start

    def pick(messages: Any) -> Any:
        if "Question 2" in messages[-1].text:
            raise TemplateError("roles must alternate")
        return start(messages)

    agent.template.start = pick  # type: ignore[method-assign]
    result = await agent.run(QUESTIONS)
    assert [t.stop is StopReason.ANSWER for t in result] == [True, True, False, True]
    assert "roles must alternate" in result[2].failures[0].message


async def test_failed_reward_is_retried_and_fails_only_its_chain() -> None:
    calls_by_chain: Counter[int] = Counter()

    @reward
    def picky(prediction: str, answer: int) -> float:
        calls_by_chain[answer] += 1
        if answer == 1 or (answer == 2 and calls_by_chain[2] == 1):
            raise ValueError("no judge")
        return 1.0

    result = await byte_agent("ok", reward=picky).run(QUESTIONS)
    assert result.rewards == [1.0, None, 1.0, 1.0]
    assert dict(calls_by_chain) == {0: 1, 1: 2, 2: 2, 3: 1}
    assert [t.treatment for t in result] == [
        TrainingTreatment.TRAIN,
        TrainingTreatment.MASK,
        TrainingTreatment.TRAIN,
        TrainingTreatment.TRAIN,
    ]
    assert [len(t.failures) for t in result] == [0, 2, 1, 0]
    assert all(t.stop is StopReason.ANSWER for t in result)
    (zero,) = await byte_agent("ok", reward=picky).run([QUESTIONS[1]], failures={"reward": "zero", "retries": 0})
    assert (zero.treatment, len(zero.failures)) == (TrainingTreatment.ZERO, 1)


@pytest.mark.parametrize(
    ("error", "kind"),
    [(ValueError("no judge"), FailureKind.REWARD), (EnvironmentFault("it died"), FailureKind.ENVIRONMENT)],
)
async def test_failed_reward_keeps_the_stop_reason_and_treatment_of_a_failed_chain(
    error: Exception, kind: FailureKind
) -> None:
    @reward
    def broken(prediction: str) -> float:
        raise error

    failures = {"truncation": "drop_group", "reward": "mask", "environment": "mask", "retries": 0}
    (chain,) = await byte_agent("a reply", reward=broken).run("a", failures=failures, sampling={"max_tokens": 2})
    assert (chain.stop, chain.treatment) == (StopReason.TRUNCATED, TrainingTreatment.DROP_GROUP)
    assert [failure.kind for failure in chain.failures] == [kind]


async def test_unknown_reward_parameter_is_rejected_before_the_first_token() -> None:
    @reward
    def wants(prediction: str, targett: int) -> float:
        return 0.0

    backend = Recording("ok")
    with pytest.raises(ConfigError, match="targett"):
        await byte_agent(backend, reward=wants).run([*QUESTIONS])
    assert backend.requests == []


# ── failure policy and retries ──


class Shaky(Environment):
    """Breaks in the first lives of every task."""

    lives: ClassVar[Counter[str]] = Counter()
    breaks = 1

    async def reset(self, task: Task) -> None:
        self.task = task
        Shaky.lives[task.id] += 1
        self.life = Shaky.lives[task.id]

    @tool
    async def act(self) -> str:
        """Act."""
        if self.life <= Shaky.breaks:
            raise EnvironmentFault("the world ended")
        return f"life {self.life}"


@pytest.fixture
def shaky() -> type[Shaky]:
    Shaky.lives, Shaky.breaks = Counter(), 1
    return Shaky


async def test_environment_fault_is_retried_with_a_new_instance(shaky: type[Shaky]) -> None:
    events: list[Event] = []
    agent = byte_agent([call("act"), "done"], tools=[shaky])
    (trajectory,) = await agent.run("Go.", observer=events.append)
    assert (trajectory.stop, trajectory.attempts) == (StopReason.ANSWER, 2)
    assert "life 2" in trajectory.messages[2].text
    assert [(f.kind, f.attempt) for f in trajectory.failures] == [(FailureKind.ENVIRONMENT, 0)]
    assert len(trajectory.turns) == 2
    assert [type(e) for e in events if isinstance(e, ChainStarted | ChainRetried | ChainEnded)] == [
        ChainStarted, ChainRetried, ChainStarted, ChainEnded,
    ]  # fmt: skip
    assert [(pool.evicted, pool.started) for pool in agent.manager.pool_metrics()] == [(1, 2)]
    await close_and_expect_no_leases(agent)


async def test_fault_cancels_the_other_calls_before_the_retry(shaky: type[Shaky]) -> None:
    log: list[str] = []

    @tool
    async def linger() -> str:
        """Wait for ever, and be slow to stop."""
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.005)
            log.append("stopped")
        return ""

    def watch(event: Event) -> None:
        if isinstance(event, ChainRetried):
            log.append("retried")

    shaky.breaks = 9
    agent = byte_agent(["\n".join([call("linger"), call("act")])], tools=[shaky, linger])
    async with leaves_nothing_behind(agent):
        await agent.run("Go.", observer=watch)
    assert log == ["stopped", "retried", "stopped"]


async def test_failure_policy_sets_retries_and_treatment(shaky: type[Shaky]) -> None:
    shaky.breaks = 9
    agent = byte_agent([call("act"), "done"], tools=[shaky])
    result = await agent.run("Go.", failures={"retries": 2, "environment": "drop_group"})
    assert (result[0].stop, result[0].attempts) == (StopReason.ENVIRONMENT_FAULT, 3)
    assert result[0].treatment is TrainingTreatment.DROP_GROUP
    assert [f.attempt for f in result[0].failures] == [0, 1, 2]
    assert result.metrics["chain/retries"] == 2
    assert result.metrics["failure/environment"] == 3
    assert shaky.lives["0"] == 3


async def test_a_backend_fault_is_retried() -> None:
    tries = 0

    async def speak(turn: ScriptedTurn) -> str:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise BackendFault("connection lost")
        return "ok"

    (trajectory,) = await byte_agent(speak).run("Go.")
    assert (trajectory.stop, trajectory.attempts) == (StopReason.ANSWER, 2)


@pytest.mark.parametrize("treatment", list(TrainingTreatment))
async def test_failure_policy_sets_the_treatment_of_truncation(treatment: TrainingTreatment) -> None:
    agent = byte_agent("a long reply")
    (trajectory,) = await agent.run("Go.", sampling={"max_tokens": 3}, failures={"truncation": treatment.value})
    assert (trajectory.stop, trajectory.treatment) == (StopReason.TRUNCATED, treatment)


async def test_failing_close_is_reported_and_keeps_the_result(caplog: pytest.LogCaptureFixture) -> None:
    class Sticky(Environment):
        @tool
        async def poke(self) -> str:
            """Poke."""
            return "ok"

        async def close(self) -> None:
            raise OSError("stuck")

    agent = byte_agent([call("poke"), "done"], tools=[Sticky])
    (trajectory,) = await agent.run("Go.")
    assert (trajectory.stop, trajectory.treatment, trajectory.failures) == (
        StopReason.ANSWER,
        TrainingTreatment.TRAIN,
        (),
    )
    await close_and_expect_no_leases(agent)
    assert "Sticky.close failed: OSError: stuck" in caplog.text


# ── wall clock and cancellation ──


class Phases(Environment):
    """Hangs where it is told to, until it is cancelled."""

    hangs = ""
    reached: asyncio.Event

    async def _phase(self, name: str) -> None:
        if Phases.hangs == name:
            Phases.reached.set()
            await asyncio.Event().wait()

    async def start(self) -> None:
        await self._phase("start")

    async def reset(self, task: Task) -> None:
        await self._phase("reset")

    @tool
    async def act(self) -> str:
        """Act."""
        await self._phase("tool")
        return "acted"


@reward
async def judged(env: Phases) -> float:
    await env._phase("reward")
    return 1.0


def hanging(phase: str) -> BaseAgent:
    Phases.hangs, Phases.reached = phase, asyncio.Event()

    async def speak(turn: ScriptedTurn) -> str:
        if phase == "generate" and turn.turn == 1:
            Phases.reached.set()
            await asyncio.Event().wait()
        return "\n".join([call("act"), call("add", a=1, b=1)]) if turn.turn == 0 else "done"

    return byte_agent(speak, tools=[Phases, add], reward=judged)


@asynccontextmanager
async def leaves_nothing_behind(agent: BaseAgent) -> AsyncIterator[None]:
    earlier_tasks = asyncio.all_tasks()
    yield
    await close_and_expect_no_leases(agent)
    assert asyncio.all_tasks() == earlier_tasks


async def close_and_expect_no_leases(agent: BaseAgent) -> None:
    """What is left is idle or on its way, and goes with the manager."""
    assert [(pool.leased, pool.waiting) for pool in agent.manager.pool_metrics() if pool.leased or pool.waiting] == []
    await agent.manager.close()
    assert agent.manager.num_instances == 0


PHASES = ["start", "reset", "tool", "generate", "reward"]


@pytest.mark.parametrize("phase", PHASES)
async def test_cancelling_in_any_phase_releases_everything(phase: str) -> None:
    agent = hanging(phase)
    async with leaves_nothing_behind(agent):
        running = asyncio.create_task(agent.run(QUESTIONS, num_chains=2))
        await asyncio.wait_for(Phases.reached.wait(), 60)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running


@pytest.mark.parametrize("phase", [p for p in PHASES if p != "reward"])
async def test_chain_seconds_ends_the_chain_and_releases_everything(phase: str) -> None:
    agent = hanging(phase)
    async with leaves_nothing_behind(agent):
        (trajectory,) = await agent.run("Go.", chain_seconds=0.05, failures={"timeout": "zero"})
        assert (trajectory.stop, trajectory.treatment) == (StopReason.TIMEOUT, TrainingTreatment.ZERO)
        assert "0.05 s" in trajectory.failures[0].message


async def test_cancelling_does_not_wait_for_a_plain_function_that_blocks() -> None:
    reached, free = threading.Event(), threading.Event()

    @tool
    def block() -> str:
        """Block a thread."""
        reached.set()
        free.wait(60)
        return "late"

    agent = byte_agent([call("block"), "done"], tools=[block])
    async with leaves_nothing_behind(agent):
        running = asyncio.create_task(agent.run("Go.", num_chains=2))
        while not reached.is_set():
            await asyncio.sleep(0.001)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(running, 60)
    free.set()


async def test_closing_the_iterator_early_releases_everything() -> None:
    agent = byte_agent(ScriptedBackend([call("draw", line="x"), "done"], latency=random_latency(3)), tools=[Board])
    async with leaves_nothing_behind(agent):
        chains = agent.iterate(QUESTIONS, num_chains=4)
        async for _ in chains:
            break
        await chains.aclose()  # type: ignore[attr-defined]


async def test_dropped_iterator_is_closed_by_the_loop() -> None:
    agent = byte_agent(ScriptedBackend([call("draw", line="x"), "done"], latency=random_latency(3)), tools=[Board])
    earlier_tasks = asyncio.all_tasks()
    async for _ in agent.iterate(QUESTIONS, num_chains=4):
        break
    gc.collect()
    async with asyncio.timeout(60):
        while any(pool.leased or pool.waiting for pool in agent.manager.pool_metrics()):
            await asyncio.sleep(0)
        await close_and_expect_no_leases(agent)
        while asyncio.all_tasks() != earlier_tasks:
            await asyncio.sleep(0)


async def test_a_run_that_fails_releases_everything() -> None:
    def complete(turn: ScriptedTurn) -> str:
        if turn.turn == 1 and turn.chain == "2/0":
            raise ConfigError("no")
        return call("draw", line="x") if turn.turn < 2 else "done"

    agent = byte_agent(ScriptedBackend(complete, latency=random_latency(1)), tools=[Board])
    async with leaves_nothing_behind(agent):
        with pytest.raises(ConfigError):
            await agent.run(QUESTIONS)


async def test_the_iterator_yields_chains_as_they_finish() -> None:
    gates = [asyncio.Event() for _ in range(3)]

    async def speak(turn: ScriptedTurn) -> str:
        await gates[int(turn.chain[0])].wait()
        return "ok"

    seen = []
    gates[1].set()
    async for trajectory in byte_agent(speak).iterate(["a", "b", "c"]):
        seen.append(trajectory.group)
        gates[{1: 2, 2: 0, 0: 0}[trajectory.group]].set()
    assert seen == [1, 2, 0]


# ── seeds ──


def record_of(result: Any) -> list[Any]:
    return [[s.to_json() for s in t.segments] + [t.prediction, t.stop.value] for t in result]


async def test_seed_repeats_a_run_in_any_scheduling_order() -> None:
    runs = []
    for salt in range(4):
        agent = byte_agent(ScriptedBackend(reply_at_random, latency=random_latency(salt), slots=1 + salt), tools=[add])
        runs.append(record_of(await agent.run(QUESTIONS, num_chains=3, seed=7, max_concurrent_chains=2 + 3 * salt)))
    assert runs[1:] == runs[:1] * 3
    other = byte_agent(ScriptedBackend(reply_at_random), tools=[add])
    assert record_of(await other.run(QUESTIONS, num_chains=3, seed=8)) != runs[0]


async def test_chains_and_turns_of_one_seed_differ() -> None:
    backend = Recording(lambda turn: call("add", a=1, b=turn.random.randrange(10**9)))
    agent = byte_agent(backend, tools=[add])
    await agent.run(QUESTIONS, num_chains=2, max_turns=3, seed=1)
    seeds = [request.sampling.seed for request in backend.requests]
    assert len(set(seeds)) == len(seeds) == 24
    unseeded = byte_agent(ScriptedBackend(lambda turn: str(turn.random.random())))
    assert len({t.prediction for t in await unseeded.run("Go.", num_chains=8)}) == 8


async def test_sampling_seed_is_the_seed_of_the_run() -> None:
    one = await byte_agent(ScriptedBackend(reply_at_random), tools=[add]).run(QUESTIONS, seed=3, num_chains=2)
    two = await byte_agent(ScriptedBackend(reply_at_random), tools=[add]).run(
        QUESTIONS, sampling={"seed": 3}, num_chains=2
    )
    assert record_of(one) == record_of(two)
    with pytest.raises(ConfigError, match="two names"):
        await byte_agent("x").run("Go.", seed=1, sampling={"seed": 2})


# ── re-entrancy ──


async def test_concurrent_runs_of_one_agent_are_independent() -> None:
    agent = byte_agent(
        ScriptedBackend(lambda t: t.prompt.split("user\n")[1].split("<")[0], latency=random_latency(5)),
        manager=ResourceManager(),
    )
    one, two = await asyncio.gather(
        agent.run([f"one {i}" for i in range(5)], num_chains=2), agent.run([f"two {i}" for i in range(5)], num_chains=2)
    )
    assert [t.prediction for t in one] == [f"one {i}" for i in range(5) for _ in range(2)]
    assert [t.prediction for t in two] == [f"two {i}" for i in range(5) for _ in range(2)]


async def test_gc_threshold_is_restored() -> None:
    threshold, during = gc.get_threshold(), []
    agent = byte_agent(lambda turn: during.append(gc.get_threshold()[0]) or "Done.")
    await asyncio.gather(agent.run(["a", "b"]), agent.run("c"))
    assert set(during) == {20_000}
    assert gc.get_threshold() == threshold
    gc.set_threshold(0)  # off: somebody means it
    try:
        await agent.run("d")
        assert during[-1] == 0
        assert gc.get_threshold()[0] == 0
    finally:
        gc.set_threshold(*threshold)
