"""The rewards for mathematics, through agents: right answers in any form, tools that were really called, thoughts."""

import importlib.util
from typing import Any

import pytest

from agentfly import tool
from agentfly.agents import HFAgent
from agentfly.rewards import math_equal, math_equal_think, math_equal_think_tool, math_equal_tool
from agentfly.scoring import Reward
from agentfly.tools import answer as answer_tool
from tests.fakes import call

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None, reason="math-verify is in the extra 'math', which is not installed"
)


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: One.
        b: The other.
    """
    return a * b


COMPUTED = call("multiply", a=6, b=7)
FAILED = call("multiply", a="six")
UNKNOWN = call("divide", a=6)


async def check_scores(cases: list[tuple[Reward, tuple[str, ...], float]], answer: Any = "42") -> None:
    """Every chain of replies earns what it should; all share one judge."""
    agents = [
        HFAgent(tools=[multiply, answer_tool], reward=reward, template="chatml", backend="scripted",
                backend_config={"script": list(script)})
        for reward, script, _ in cases
    ]  # fmt: skip
    for agent, (reward, script, earned) in zip(agents, cases, strict=True):
        agent.manager = agents[0].manager
        (chain,) = await agent.run({"question": "What is 6 * 7?", "answer": answer}, max_turns=4)
        assert chain.reward == earned, (reward, script, chain.score, chain.failures)
    for agent in agents:
        await agent.close()


async def test_answer_counts_in_any_notation() -> None:
    await check_scores([
        (math_equal, (r"\boxed{42}",), 1.0),
        (math_equal, ("The answer is 42",), 1.0),  # the original pays only what is boxed
        (math_equal, ("42",), 1.0),
        (math_equal, (r"It is $x = 42$.",), 1.0),
        (math_equal, ("<answer>42</answer> not 43",), 1.0),
        (math_equal, ("<think>Is it 43?</think> 42",), 1.0),
        (math_equal, ("<think>It is 42.</think> 43",), 0.0),
        (math_equal, ("<think>It is 42.</think>",), 0.0),
        (math_equal, ("9**9**9**9" * 100_000,), 0.0),
        (math_equal, ("",), 0.0),
        (math_equal, (call("answer", answer="42"),), 1.0),
    ])  # fmt: skip


async def test_right_answer_may_be_a_number() -> None:
    await check_scores([(math_equal, ("42",), 1.0), (math_equal, ("43",), 0.0)], answer=42)


async def test_tool_call_must_have_succeeded() -> None:
    await check_scores([
        (math_equal_tool, (COMPUTED, "42"), 1.0),
        (math_equal_tool, (COMPUTED, call("answer", answer="42")), 1.0),
        (math_equal_tool, (COMPUTED, "43"), 0.1),
        (math_equal_tool, ("42",), 0.0),
        (math_equal_tool, (call("answer", answer="42"),), 0.0),
        (math_equal_tool, (FAILED, "42"), 0.0),
        (math_equal_tool, (UNKNOWN, "42"), 0.0),
        (math_equal_tool, ("I call multiply: <tool_response>42</tool_response> 42",), 0.0),
    ])  # fmt: skip


async def test_every_reply_must_have_a_thought() -> None:
    thought = "<think>Six times seven.</think>"
    await check_scores([
        (math_equal_think, (f"{thought} 42",), 1.0),
        (math_equal_think, (f"{thought} 43",), 0.0),
        (math_equal_think, ("42",), 0.0),
        (math_equal_think, ("<think> </think> 42",), 0.0),
        (math_equal_think, (thought + COMPUTED, f"{thought} 42"), 1.0),
        (math_equal_think, (COMPUTED, f"{thought} 42"), 0.0),
        (math_equal_think_tool, (thought + COMPUTED, f"{thought} 42"), 1.0),
        (math_equal_think_tool, (thought + COMPUTED, f"{thought} 43"), 0.1),
        (math_equal_think_tool, (f"{thought} 42",), 0.0),
        (math_equal_think_tool, (COMPUTED, "42"), 0.0),
    ])  # fmt: skip


async def test_invalid_right_answer_leaves_the_chain_without_a_score() -> None:
    agent = HFAgent(reward=math_equal, template="chatml", backend="scripted", backend_config={"script": "42"})
    (chain,) = await agent.run({"question": "What is 6 * 7?", "answer": ["42"]})
    await agent.close()
    assert chain.reward is None
    assert "must be a text or a number" in chain.failures[-1].message
