"""One action per turn, between tags."""

import pytest

from agentfly import Environment, Task, tool
from agentfly.agents import ActionAgent
from agentfly.backends.scripted import ScriptedBackend
from agentfly.trajectory import CallStatus, StopReason


class Maze(Environment):
    """Two steps north is out."""

    async def reset(self, task: Task) -> None:
        self.steps = 0

    @tool
    async def step(self, action: str) -> dict[str, object]:
        """Take a step."""
        self.steps += action == "go north"
        return {"observation": f"you went {self.steps}", "ends_chain": self.steps == 2}


def player(script: list[str]) -> ActionAgent:
    return ActionAgent("bytes", template="chatml", tools=[Maze], backend=ScriptedBackend(script))


@pytest.mark.parametrize(
    ("text", "action", "thinking"),
    [
        ("<think>hm</think><action>go north</action>", "go north", "hm"),
        ("<action> go north </action> and more", "go north", ""),
        ("<think>try <action>dig</action>?</think> <action>go north</action>", "go north", "try <action>dig</action>?"),
        ("<action>go north</action><action>go south</action>", "go north", ""),
        ("<think>never closed <action>go north</action>", "go north", ""),
    ],
)
def test_first_action_after_the_thinking_is_parsed(text: str, action: str, thinking: str) -> None:
    reply = player(["x"]).parse(text)
    (call,) = reply.calls
    assert (call.name, call.arguments, reply.message.thinking) == ("step", {"action": action}, thinking)


def test_unclosed_action_is_a_parse_error_and_actions_in_thinking_are_ignored() -> None:
    (call,) = player(["x"]).parse("<think>so</think><action>go north").calls
    assert "not closed" in call.problem
    assert player(["x"]).parse("<think>maybe <action>dig</think> wait").calls == ()


async def test_environment_ends_the_chain() -> None:
    script = ["<action>go north</action>", "let me think", "<action>go", "<think>on</think><action>go north</action>"]
    (trajectory,) = await player(script).run("Get out.")
    assert (trajectory.stop, trajectory.prediction) == (StopReason.TOOL_END, "you went 2")
    assert [c.status for c in trajectory.calls] == [CallStatus.OK, CallStatus.INVALID, CallStatus.OK]
