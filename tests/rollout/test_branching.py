"""Tree sampling: branches share a prefix, continue in copies of the environment, and are recorded as such."""

from typing import Any

import pytest

from agentfly import Environment, Task, reward, tool
from agentfly.backends.scripted import ScriptedBackend, ScriptedTurn
from agentfly.environment import Pool
from agentfly.errors import ConfigError, EnvironmentFault
from agentfly.evaluation import evaluate
from agentfly.resources import ResourceManager
from agentfly.rollout.events import ChainRetried, Event
from agentfly.trajectory import FailureKind, Trajectory
from tests.fakes import byte_agent, call

BRANCHING = {"turn": 2, "branches": 3}


class Counter(Environment):
    """Counts presses."""

    async def reset(self, task: Task) -> None:
        self.shown = 0

    @tool
    async def press(self, times: int) -> str:
        """Press the button."""
        self.shown += times
        return f"It shows {self.shown}."

    async def snapshot(self) -> int:
        return self.shown

    async def restore(self, state: int) -> None:
        self.shown = state


@reward
def shown(env: Counter) -> float:
    return float(env.shown)


def presses(turn: ScriptedTurn) -> str:
    """Four presses of up to 99 each, by the seed of the turn; then an answer."""
    return call("press", times=turn.random.randrange(1, 100)) if turn.turn < 4 else "done"


def numbers(chain: Trajectory) -> list[int]:
    """What the counter showed after each turn."""
    texts = [message.text for message in chain.messages if message.role == "tool"]
    return [int(text.split()[-1].rstrip(".")) for text in texts]


async def test_branches_share_the_prefix_and_continue_in_copies_of_the_environment() -> None:
    agent = byte_agent(presses, tools=[Counter], reward=shown)
    result = await agent.run(["a", "b"], num_chains=2, branching=BRANCHING, seed=3)
    assert [(chain.group, chain.chain, chain.branch_of) for chain in result] == [
        (group, *chain_and_origin)
        for group in (0, 1)
        for chain_and_origin in ((0, None), (1, None), (2, 0), (3, 0), (4, 1), (5, 1))
    ]
    for group in result.groups:
        for chain in group[2:]:
            root = group[chain.branch_of or 0]
            assert chain.branch_turn == 2
            assert numbers(chain)[:2] == numbers(root)[:2]
            assert numbers(chain)[2] != numbers(root)[2]
            shared = [span for span in chain.segments[0].spans if span.turn < 2]
            assert shared == [span for span in root.segments[0].spans if span.turn < 2]
            assert chain.sampled_tokens < root.sampled_tokens  # those of the prefix were sampled once
            assert Trajectory.from_json(chain.to_json()) == chain
        for chain in group:  # no branch has acted in the environment of another
            assert chain.reward == numbers(chain)[-1]
            assert [message.text for message in chain.messages if message.role == "assistant"][-1] == "done"
    again = await agent.run(["a", "b"], num_chains=2, branching=BRANCHING, seed=3)
    assert again.rewards == result.rewards


async def test_limit_of_concurrent_chains_holds_with_branches() -> None:
    running = peak = 0

    class Watched(Counter):
        async def reset(self, task: Task) -> None:
            nonlocal running, peak
            running += 1
            peak = max(peak, running)
            await super().reset(task)

        @tool
        async def stop(self) -> str:
            """Stop."""
            nonlocal running
            running -= 1
            return "stopped"

    def script(turn: ScriptedTurn) -> str:
        return presses(turn) if turn.turn < 4 else call("stop") if turn.turn == 4 else "done"

    agent = byte_agent(ScriptedBackend(script, latency=0.001), tools=[Watched])
    result = await agent.run(["a"] * 3, num_chains=2, branching=BRANCHING, max_concurrent_chains=2)
    assert len(result) == 3 * 6
    assert peak == 2
    assert running == 0


async def test_chain_that_ends_before_the_branching_point_is_not_branched() -> None:
    agent = byte_agent([call("press", times=1), "done"], tools=[Counter], reward=shown)
    result = await agent.run("a", num_chains=2, branching={"turn": 2, "branches": 4})
    assert [(chain.chain, chain.branch_of) for chain in result] == [(0, None), (1, None)]


async def test_chain_that_fails_after_its_fork_continues_from_there() -> None:
    class Fragile(Counter):
        failed = False

        @tool
        async def press(self, times: int) -> str:
            """Press the button."""
            if times == 77 and not Fragile.failed:
                Fragile.failed = True
                raise EnvironmentFault("broken")
            self.shown += times
            return f"It shows {self.shown}."

    def script(turn: ScriptedTurn) -> str:
        if turn.turn == 3:
            return "done"
        return call("press", times=77 if turn.turn == 2 and turn.chain == "0/0" else turn.random.randrange(1, 50))

    events: list[Event] = []
    agent = byte_agent(script, tools=[Fragile])
    result = await agent.run("a", branching={"turn": 2, "branches": 2}, seed=1, observer=events.append)
    root, branch = result
    assert [type(event) for event in events].count(ChainRetried) == 1
    assert (root.attempts, branch.attempts) == (2, 1)
    assert numbers(root)[:2] == numbers(branch)[:2]
    assert numbers(root)[2] == numbers(root)[1] + 77
    assert len(root.failures) == 1


async def test_retried_branch_records_failures_before_its_fork_once() -> None:
    class Fragile(Counter):
        failed = False

        @tool
        async def press(self, times: int) -> str:
            """Press the button."""
            if times == 13:
                raise ValueError("stuck")
            if times == 77 and not Fragile.failed:
                Fragile.failed = True
                raise EnvironmentFault("broken")
            self.shown += times
            return f"It shows {self.shown}."

    def script(turn: ScriptedTurn) -> str:
        if turn.turn == 3:
            return "done"
        return call("press", times={0: 13, 1: 5}.get(turn.turn, 1 if turn.chain == "0/0" else 77))

    agent = byte_agent(script, tools=[Fragile])
    root, branch = await agent.run("a", branching={"turn": 2, "branches": 2}, seed=1)
    assert (root.attempts, branch.attempts) == (1, 2)
    assert [failure.kind for failure in root.failures] == [FailureKind.TOOL]
    assert [failure.kind for failure in branch.failures] == [FailureKind.TOOL, FailureKind.ENVIRONMENT]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"branching": {"turn": 10, "branches": 2}}, "would have no effect: chains have at most 10"),
        ({"branching": {"turn": 1, "branches": 1}}, "branching: branches must be a whole number of at least 2"),
        ({"branching": {"turn": 0, "branches": 2}}, "branching: turn must be a whole number of at least 1"),
        ({"branching": {"turns": 1}}, "it has turn and branches"),
        ({"branching": 3}, "must be a Branching or a mapping"),
    ],
)
async def test_wrong_branching_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        await byte_agent(presses, tools=[Counter]).run("a", **options)


async def test_environment_that_cannot_be_copied_is_refused() -> None:
    class Plain(Environment):
        @tool
        async def act(self) -> str:
            """Act."""
            return "done"

    class Shared(Counter):
        pool = Pool(scope="group")  # type: ignore[arg-type]

    with pytest.raises(ConfigError, match="Plain cannot be branched: give it the methods `snapshot` and `restore`"):
        await byte_agent("done", tools=[Plain]).run("a", branching=BRANCHING)
    with pytest.raises(ConfigError, match="Shared is shared by the chains of a task"):
        await byte_agent("done", tools=[Shared]).run("a", branching=BRANCHING)
    with pytest.raises(ConfigError, match="independent chains"):
        await evaluate(byte_agent(presses, tools=[Counter], reward=shown), "a", branching=BRANCHING)


@pytest.mark.parametrize("kind", ["lookup", "search", "sql", "alfworld", "webshop"])
@pytest.mark.integration
async def test_prebuilt_environment_continues_from_a_snapshot(kind: str) -> None:
    """The expert finishes the task from a snapshot in another instance, with the same observations."""
    from agentfly.environments import SQL, ALFWorld, Lookup, Search, WebShop

    env_class: type[Environment] = {
        "lookup": Lookup, "search": Search, "sql": SQL, "alfworld": ALFWorld, "webshop": WebShop
    }[kind]  # fmt: skip
    row = env_class.draw_tasks("train", 1, seed=5)[0]
    task = Task.of(row)

    async def act(environment: Any) -> Any:
        step = environment.expert()
        return step if isinstance(step, str) else await getattr(environment, step.name)(**step.arguments)

    manager = ResourceManager()
    async with manager.leases(task, [env_class]) as leases:
        one = await leases.get(env_class)
        await act(one)
        state = await leases.snapshot()
        first = [await act(one) for _ in range(3)]
        for _ in range(2):  # it can be restored several times, and does not follow the instance
            async with manager.leases(task, [env_class]) as other:
                await other.restore(state)
                two = await other.get(env_class)
                assert [await act(two) for _ in range(3)] == first
    await manager.close()
