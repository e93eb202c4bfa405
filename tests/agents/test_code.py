"""Code as action: which block is run, and the error for one that cannot be."""

import pytest

from agentfly import tool
from agentfly.agents import ActionAgent, CodeAgent
from agentfly.backends.scripted import ScriptedBackend
from agentfly.errors import ConfigError
from agentfly.trajectory import CallStatus, StopReason


@tool
async def python(code: str, seconds: int = 5) -> str:
    """Run code."""
    return f"ran {code.strip()}"


@tool
async def add(a: int, b: int) -> str:
    """Add."""
    return ""


@tool
async def nothing() -> str:
    """Take nothing."""
    return ""


def coder(script: list[str]) -> CodeAgent:
    return CodeAgent("bytes", template="chatml", tools=[python], backend=ScriptedBackend(script))


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("Run:\n```python\nprint(1)\n```\nthanks", "print(1)\n"),
        ("```py\nprint(1)\n```", "print(1)\n"),
        ("<code>\nprint(1)\n</code>", "print(1)\n"),
        ("```python\na\n```\n```python\nb\n```", "a\n"),
        ("```bash\nls\n```\n```python  \nb\n```", "b\n"),
    ],
)
def test_the_first_block_of_python_is_the_call(text: str, code: str) -> None:
    (call,) = coder(["x"]).parse(text).calls
    assert (call.name, call.arguments) == ("python", {"code": code})


def test_code_in_thinking_is_not_run_and_the_text_is_the_answer() -> None:
    mused = "<think>```python\nrm()\n```</think>"
    (call,) = coder(["x"]).parse(mused + "```python\nok()\n```").calls
    assert call.arguments == {"code": "ok()\n"}
    assert coder(["x"]).parse(mused + "\nIt is 2.").answer == "It is 2."
    cut = coder(["x"]).parse(mused.removesuffix("</think>"))
    assert (cut.calls, cut.answer) == ((), None)


@pytest.mark.parametrize("text", ["```python\nprint(1)", "so: <code>print(1)"])
def test_unclosed_block_is_a_parse_error(text: str) -> None:
    (call,) = coder(["x"]).parse(text).calls
    assert "not closed" in call.problem


async def test_code_is_run_and_a_reply_without_it_is_the_answer() -> None:
    agent = coder(["```python\n1 + 1\n```", "```python\noops", "It is 2, `2`."])
    (trajectory,) = await agent.run("1+1?")
    assert (trajectory.stop, trajectory.prediction) == (StopReason.ANSWER, "It is 2, `2`.")
    assert [c.status for c in trajectory.calls] == [CallStatus.OK, CallStatus.INVALID]
    assert [m.text for m in trajectory.messages if m.role == "user"][1] == "Output:\nran 1 + 1"


@pytest.mark.parametrize("kind", [CodeAgent, ActionAgent])
@pytest.mark.parametrize("tools", [[], [python, add], [add], [nothing]])
def test_agent_takes_one_tool_with_one_text_parameter(kind: type[CodeAgent], tools: list[object]) -> None:
    with pytest.raises(ConfigError, match=r"one tool|one text"):
        kind("bytes", template="chatml", tools=tools, backend=ScriptedBackend("x"))
