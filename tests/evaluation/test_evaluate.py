"""Evaluation and its figures; tests/cli/test_evaluate.py kills one and resumes it."""

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest

from agentfly import Environment, reward, tool
from agentfly.agents import HFAgent
from agentfly.backends.base import Request
from agentfly.backends.scripted import ScriptedBackend, ScriptedTurn
from agentfly.environment import Pool
from agentfly.errors import BackendFault, ConfigError, DataError
from agentfly.evaluation import Evaluation, evaluate
from agentfly.rollout.events import ChainEnded, Event
from agentfly.types import Completion, Sampling
from tests.fakes import byte_agent


@reward
def answers_yes(prediction: str) -> float:
    return float(prediction == "yes")


@reward
def answer_as_number(prediction: str) -> float:
    return float(prediction)


def solver(turn: ScriptedTurn) -> str:
    """Solves task 0 always, task 1 in its first chain of four, task 2 never."""
    group, chain = map(int, turn.chain.split("/"))
    return "yes" if group == 0 or (group == 1 and chain == 0) else "no"


ROWS = [{"question": f"{i}?", "level": level} for i, level in enumerate([1, 10, 2])]


async def test_pass_at_k_rewards_and_columns() -> None:
    agent = byte_agent(solver, reward=answers_yes)
    evaluation = await evaluate(agent, ROWS, chains=4, by="level")
    assert (evaluation.tasks, evaluation.chains, evaluation.unscored) == (3, 12, 0)
    assert evaluation.reward.mean == pytest.approx((1 + 1 / 4 + 0) / 3)
    assert {k: estimate.mean for k, estimate in evaluation.pass_at.items()} == pytest.approx({
        1: (1 + 1 / 4) / 3, 2: (1 + 1 / 2) / 3, 4: 2 / 3,
    })  # fmt: skip
    assert evaluation.success == evaluation.pass_at[1]
    assert list(evaluation.by["level"]) == ["1", "2", "10"]
    assert [part.reward.mean for part in evaluation.by["level"].values()] == [1.0, 0.0, 0.25]
    assert evaluation.stops == {"answer": 12}
    assert (evaluation.turns, evaluation.calls) == (1.0, 0.0)
    assert evaluation.tokens == pytest.approx(
        (5 * 4 + 7 * 3) / 12
    )  # yes and no, each with the token that ends the turn
    assert evaluation.greedy is None


async def test_table_and_json_contain_all_results() -> None:
    from rich.console import Console

    agent = byte_agent(solver, reward=answers_yes)
    evaluation = await evaluate(agent, ROWS, chains=2, greedy=True, by=["level"])
    console = Console(width=80)
    with console.capture() as capture:
        console.print(evaluation)
    for line in ("pass@2 0.667 0.208 – 0.939", "greedy 0.333", "level tasks reward", "10 1 0.500"):
        assert line in " ".join(capture.get().split())
    closing = "3 tasks, 9 chains (3 of them greedy), 0 unscored; ends: answer 9"
    assert closing in " ".join(capture.get().split())
    whole = json.loads(json.dumps(evaluation.to_json(), allow_nan=False))
    assert whole["pass_at"]["2"][0] == pytest.approx(2 / 3)
    assert whole["by"]["level"]["10"]["reward"][0] == 0.5
    assert evaluation.figures.reward == evaluation.reward.mean
    assert evaluation.figures.metrics["level=10/reward"] == 0.5


async def test_greedy_chains_are_counted_and_have_their_own_figure() -> None:
    temperatures: list[float] = []

    class Watched(HFAgent):
        async def generate_async(self, request: Any) -> Any:
            temperatures.append(request.sampling.temperature)
            return await super().generate_async(request)

    agent = Watched(template="chatml", reward=answers_yes, backend="scripted", backend_config={"script": solver})
    evaluation = await evaluate(agent, ROWS, chains=2, greedy=True)
    assert sorted(temperatures) == [0.0] * 3 + [1.0] * 6
    assert evaluation.chains == evaluation.to_json()["chains"] == sum(evaluation.stops.values()) == 9
    assert evaluation.greedy is not None
    assert evaluation.greedy.mean == pytest.approx(1 / 3)
    with pytest.raises(ConfigError, match="every chain is greedy"):
        await evaluate(agent, ROWS, greedy=True, sampling=Sampling(temperature=0.0))


async def test_first_tasks_are_sampled_first() -> None:
    """An evaluation that is stopped must have finished most of what it sampled."""
    sampled: list[tuple[str, int]] = []
    second_turn = asyncio.Event()

    class Watched(ScriptedBackend):
        async def generate(self, request: Request) -> Completion:
            if request.turn == 1:
                second_turn.set()
            return await super().generate(request)

    @tool
    def look() -> str:
        """Look."""
        return "seen"

    async def script(turn: ScriptedTurn) -> str:
        sampled.append((turn.chain, turn.turn))
        if len(sampled) == 2:
            await second_turn.wait()
        return '<tool_call>{"name": "look", "arguments": {}}</tool_call>' if turn.turn == 0 else "yes"

    agent = byte_agent(Watched(script, slots=1), tools=[look], reward=answers_yes)
    await evaluate(agent, [{"question": f"{i}?"} for i in range(8)])
    assert sampled[:3] == [("0/0", 0), ("1/0", 0), ("0/0", 1)]


async def test_failed_chains_are_counted_as_configured() -> None:
    def break_second_chain(turn: ScriptedTurn) -> str:
        if turn.chain.endswith("/1"):
            raise BackendFault("the server went away")
        return "yes"

    agent = byte_agent(break_second_chain, reward=answers_yes)
    zero = await evaluate(agent, ROWS, chains=2)
    assert (zero.chains, zero.unscored, zero.reward.mean) == (6, 3, 0.5)
    assert zero.failures == {"the server went away": 3}
    assert zero.stops["backend_fault"] == 3
    out = await evaluate(agent, ROWS, chains=2, unscored="leave out")
    assert (out.chains, out.unscored, out.reward.mean, out.pass_at[1].mean) == (6, 3, 1.0, 1.0)
    assert math.isnan(out.pass_at[2].mean)  # no task has two chains left to pick


async def test_real_valued_rewards_have_the_interval_of_a_mean() -> None:
    agent = byte_agent(lambda turn: str(10 * int(turn.chain[0])), reward=answer_as_number)
    evaluation = await evaluate(agent, ROWS, threshold=20)
    assert (evaluation.reward.mean, evaluation.success.mean) == (10.0, pytest.approx(1 / 3))
    assert evaluation.reward.low == pytest.approx(10 - 1.96 * 10 / math.sqrt(3), rel=1e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"chains": 0}, "chains must be a whole number of at least 1"),
        ({"max_concurrent_chains": 0}, "max_concurrent_chains must be"),
        ({"by": "colour"}, "by 'colour': no task has such a column; there are level, question"),
        ({"unscored": "ignore"}, "'zero' or 'leave out'"),
        ({"temperature": 0}, "write sampling="),
        ({"sampling": {"heat": 1}}, "sampling has no field 'heat'"),
    ],
)
async def test_invalid_arguments_are_rejected_before_the_start(arguments: dict[str, Any], message: str) -> None:
    asked_for = 0

    def script(turn: ScriptedTurn) -> str:
        nonlocal asked_for
        asked_for += 1
        return "yes"

    with pytest.raises(ConfigError, match=message):
        await evaluate(byte_agent(script, reward=answers_yes), ROWS, **arguments)
    assert asked_for == 0


async def test_an_agent_without_a_reward_cannot_be_evaluated() -> None:
    with pytest.raises(ConfigError, match="has no reward"):
        await evaluate(byte_agent("yes"), ROWS)

    @reward
    def needs_answer(answer: str) -> float:
        return 1.0

    with pytest.raises(ConfigError, match="answer"):
        await evaluate(byte_agent("yes", reward=needs_answer), ROWS)


async def test_the_seed_is_fixed_unless_one_is_given() -> None:
    agent = byte_agent(lambda turn: "yes" if turn.random.random() < 0.5 else "no", reward=answers_yes)
    rows = [f"{i}?" for i in range(30)]
    first, second = await evaluate(agent, rows, chains=2), await evaluate(agent, rows, chains=2)
    other = await evaluate(agent, rows, chains=2, sampling={"seed": 7})
    assert first == second != other


class Shared(Environment):
    """One instance for the chains of a task, and one in all."""

    pool = Pool(scope="group", max_instances=1)  # type: ignore[arg-type]

    @tool
    async def look(self) -> str:
        """Look."""
        return "nothing"


async def test_resumed_group_releases_its_environment(tmp_path: Path) -> None:
    look = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    agent = byte_agent([look, "yes"], tools=[Shared.look], reward=answers_yes)
    log = tmp_path / "eval.jsonl"
    whole = await evaluate(agent, ROWS, chains=3, log=log)
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines[:2]) + lines[5])
    async with asyncio.timeout(60):
        assert await evaluate(agent, ROWS, chains=3, log=log) == whole
    assert sum(pool.leased for pool in agent.manager.pool_metrics()) == 0
    await agent.close()


# ── going on ──


async def test_log_is_resumed_and_a_torn_line_is_cut(tmp_path: Path) -> None:
    ran: list[str] = []

    def script(turn: ScriptedTurn) -> str:
        ran.append(turn.chain)
        return solver(turn)

    log = tmp_path / "made" / "eval.jsonl"
    agent = byte_agent(script, reward=answers_yes)
    whole = await evaluate(agent, ROWS, chains=4, greedy=True, log=log)
    assert len(ran) == 15
    lines = log.read_bytes().splitlines(keepends=True)
    assert len(lines) == 16
    for kept, torn in ((8, b""), (16, b""), (5, b'{"result": {"group": 2, "ch'), (0, b'{"sett'), (1, b"\xff")):
        log.write_bytes(b"".join(lines[:kept]) + torn)
        ran.clear()
        seen: list[Any] = []
        assert await evaluate(agent, ROWS, chains=4, greedy=True, log=log, on_result=seen.append) == whole
        assert len(ran) == min(16 - kept, 15)
        assert len(seen) == 15
        assert len(log.read_bytes().splitlines()) == 16


async def test_resuming_with_other_settings_is_rejected(tmp_path: Path) -> None:
    log = tmp_path / "eval.jsonl"
    agent = byte_agent(solver, reward=answers_yes)
    await evaluate(agent, ROWS, log=log)
    for changed, message in (
        ({"chains": 2}, "chains=1, not 2"),
        ({"seed": 3}, "seed=0, not 3"),
        ({"sampling": {"top_p": 0.5}}, "top_p=1.0, not 0.5"),
        ({"max_turns": 3}, "max_turns=10, not 3"),
    ):
        with pytest.raises(ConfigError, match=message):
            await evaluate(agent, ROWS, log=log, **changed)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="tasks="):
        await evaluate(agent, ROWS[:2], log=log)
    with pytest.raises(ConfigError, match="system_prompt="):
        await evaluate(byte_agent(solver, reward=answers_yes, system_prompt="Hm."), ROWS, log=log)
    assert await evaluate(agent, ROWS, log=log, threshold=0.5, by="level")  # the figures may change


async def test_unscored_chains_are_run_again(tmp_path: Path) -> None:
    log, up = tmp_path / "eval.jsonl", False

    def script(turn: ScriptedTurn) -> str:
        if not up and turn.chain == "1/0":
            raise BackendFault("the server went away")
        return "yes"

    agent = byte_agent(script, reward=answers_yes)
    assert (await evaluate(agent, ROWS, log=log)).unscored == 1
    up = True
    again = await evaluate(agent, ROWS, log=log)
    assert (again.unscored, again.reward.mean) == (0, 1.0)


async def test_foreign_or_locked_log_is_not_changed(tmp_path: Path) -> None:
    from agentfly.evaluation import EvalLog

    agent, other = byte_agent(solver, reward=answers_yes), tmp_path / "other.jsonl"
    other.write_text('{"question": "?"}\n')
    with pytest.raises(ConfigError, match="is not an evaluation"):
        await evaluate(agent, ROWS, log=other)
    assert other.read_text() == '{"question": "?"}\n'
    with EvalLog(tmp_path / "eval.jsonl", {}), pytest.raises(ConfigError, match="another evaluation"):
        await evaluate(agent, ROWS, log=tmp_path / "eval.jsonl")
    with pytest.raises(DataError, match="could not be written"):
        await evaluate(agent, ROWS, log=tmp_path)


async def test_chain_that_is_not_json_is_logged_without_its_trajectory(tmp_path: Path) -> None:
    @reward
    def report_object(prediction: str) -> dict[str, Any]:
        return {"reward": 1.0, "what": object()}

    log = tmp_path / "eval.jsonl"
    agent = byte_agent("yes", reward=report_object)
    whole = await evaluate(agent, ROWS, log=log)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert "'what' holds a object" in lines[1]["lost"]
    assert await evaluate(agent, ROWS, log=log) == whole


async def test_a_cancelled_evaluation_stops_its_chains_and_frees_the_log(tmp_path: Path) -> None:
    started, ended = asyncio.Event(), 0

    async def script(turn: ScriptedTurn) -> str:
        nonlocal ended
        if turn.chain == "0/0":
            return "yes"
        started.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended += 1
        return "no"

    log, agent = tmp_path / "eval.jsonl", byte_agent(script, reward=answers_yes)
    running = asyncio.create_task(evaluate(agent, ROWS, log=log))
    await started.wait()
    while log.read_bytes().count(b"\n") < 2:
        await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert ended == 2
    evaluation: Evaluation = await evaluate(byte_agent("yes", reward=answers_yes), ROWS, log=log)
    assert evaluation.reward.mean == 1.0


async def test_observer_gets_every_chain_and_its_exception_ends_the_evaluation() -> None:
    seen: list[Event] = []
    await evaluate(byte_agent(solver, reward=answers_yes), ROWS, observer=seen.append)
    assert sum(isinstance(event, ChainEnded) for event in seen) == 3
    for raises in ({"on_result": lambda result: 1 / 0}, {"observer": lambda event: 1 / 0}):
        with pytest.raises(ZeroDivisionError):
            await evaluate(byte_agent(solver, reward=answers_yes), ROWS, **raises)  # type: ignore[arg-type]
