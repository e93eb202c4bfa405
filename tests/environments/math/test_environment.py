"""Mathematics with Python: generated problems, and chains through a real sandbox."""

import re
from random import Random
from typing import Any

import pytest

from agentfly.agents import HFAgent
from agentfly.environments.math import MathWithPython
from agentfly.environments.math.tasks import load_kinds, run_program
from agentfly.errors import ConfigError, DataError
from agentfly.sandbox import SandboxUnavailable, open_sandbox
from agentfly.scoring import reward
from agentfly.sft.demonstrations import demonstrate
from agentfly.types import Task, ToolCall
from tests.fakes import call


@pytest.fixture
async def _sandbox() -> None:
    try:
        await (await open_sandbox()).close()
    except SandboxUnavailable as error:
        pytest.skip(f"no sandbox works here: {error}")


@reward
def same_text(prediction: str, answer: str) -> float:
    """What the expert says is the very answer; whether it is equal in mathematics is another test's."""
    return float(prediction == answer)


def agent_of(script: Any = "-") -> HFAgent:
    return HFAgent(
        tools=[MathWithPython.run_python], reward=same_text, template="chatml", backend="scripted",
        backend_config={"script": script},
    )  # fmt: skip


# ── tasks ──


def test_rows_are_deterministic_and_larger_counts_extend_smaller() -> None:
    rows = MathWithPython.draw_tasks("train", 30, seed=3)
    assert rows == MathWithPython.draw_tasks("train", 60, seed=3)[:30]
    assert rows != MathWithPython.draw_tasks("train", 30, seed=4)
    assert [row["level"] for row in rows] == [1, 2, 3] * 10
    assert len({row["id"] for row in rows}) == len({row["program"] for row in rows}) == 30


def test_no_problem_is_in_two_splits() -> None:
    drawn = {
        split: {row["program"] for seed in (0, 1) for row in MathWithPython.draw_tasks(split, 600, seed=seed)}
        for split in ("train", "validation", "test")
    }
    assert not drawn["train"] & drawn["validation"]
    assert not drawn["train"] & drawn["test"]
    assert not drawn["validation"] & drawn["test"]


@pytest.mark.parametrize("level", [1, 2, 3])
def test_every_problem_kind_states_all_its_numbers(level: int) -> None:
    for kind in load_kinds(level):
        for seed in range(20):
            question, program = kind.draw(Random(seed))
            question_numbers = set(re.findall(r"\d+", question))
            assert question_numbers <= set(re.findall(r"\d+", program)) | {"1"}, question  # "from 1 to", "is it 1"
            assert int(run_program(program)) != 0
            assert "{" not in question + program


def test_answers_cannot_be_guessed() -> None:
    rows = MathWithPython.draw_tasks("test", 900)
    answers = [row["answer"] for row in rows]
    assert max(map(answers.count, answers)) <= 9  # one in a hundred
    named = [row for row in rows if row["answer"] in re.findall(r"-?\d+", row["question"])]
    assert len(named) <= 9


@pytest.mark.parametrize(
    ("arguments", "words"),
    [({"split": "dev"}, "train, validation, test"), ({"levels": [4]}, "1, 2, 3"), ({"levels": []}, "1, 2, 3")],
)
def test_unknown_arguments_are_rejected(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        MathWithPython.draw_tasks(**arguments)


# ── chains ──


@pytest.mark.usefixtures("_sandbox")
async def test_concurrent_experts_are_right() -> None:
    agent = agent_of()
    demonstrations = await demonstrate(agent, MathWithPython.draw_tasks("train", 66))
    await agent.close()
    assert (len(demonstrations.accepted), demonstrations.reasons) == (66, {})


@pytest.mark.usefixtures("_sandbox")
async def test_expert_does_not_use_the_answer() -> None:
    (row,) = MathWithPython.draw_tasks("train", 1)
    world = MathWithPython()
    await world.start()
    try:
        await world.reset(Task.of({**row, "program": "6 * 7", "answer": "not to be looked at"}))
        done = world.expert()
        assert done == world.expert() == ToolCall("code_interpreter", {"code": "6 * 7"})
        await world.run_python(**done.arguments)
        assert world.expert() == "42"
        await world.reset(Task.of(row))  # nothing of the last chain is left
        assert world.expert() == ToolCall("code_interpreter", {"code": row["program"]})
        assert "NameError" in (await world.run_python("_"))["observation"]
    finally:
        await world.close()


@pytest.mark.usefixtures("_sandbox")
async def test_concurrent_chains_share_nothing() -> None:
    (row,) = MathWithPython.draw_tasks("train", 1)
    script = [call("code_interpreter", code="try:\n    x += 1\nexcept NameError:\n    x = 1\nprint(x)"), "Done."]
    agent = agent_of(script)
    result = await agent.run(row, num_chains=4)
    await agent.close()
    assert [chain.messages[-2].text for chain in result] == ["1"] * 4


@pytest.mark.usefixtures("_sandbox")
async def test_malformed_code_is_answered() -> None:
    (row,) = MathWithPython.draw_tasks("train", 1)
    script = [call("code_interpreter", code=["1"]), call("code_interpreter", code="#" * 1_000_000), "Done."]
    agent = agent_of(script)
    (chain,) = await agent.run(row)
    await agent.close()
    observations = [message.text for message in chain.messages if message.role == "tool"]
    assert "code" in observations[0]
    assert observations[1] == "(no output)"
    assert chain.reward == 0.0


@pytest.mark.usefixtures("_sandbox")
async def test_problem_without_program_has_no_expert() -> None:
    world = MathWithPython()
    await world.start()
    try:
        await world.reset(Task.of({"question": "What is 1 + 1?", "answer": "2"}))
        with pytest.raises(ConfigError, match="program"):
            world.expert()
    finally:
        await world.close()
