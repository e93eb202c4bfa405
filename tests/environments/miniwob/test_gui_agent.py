"""Pages of MiniWoB++ solved in a real browser through the action formats of GUI models, from pixels alone."""

from __future__ import annotations

import pytest

from agentfly.agents import GUIAgent
from agentfly.agents.gui_formats import GUI_FORMATS
from agentfly.backends.base import Request
from agentfly.environments.miniwob import MiniWoB
from agentfly.environments.miniwob.environment import miniwob_reward
from agentfly.sft.demonstrations import demonstrate
from agentfly.trajectory import StopReason
from agentfly.types import Completion, FinishReason, Message, ToolCall
from agentfly.vision.images import open_image
from tests.environments.browsers import needs_browser
from tests.fakes import Server

pytestmark = needs_browser
pytest.importorskip("miniwob", reason="the extra gui is not installed: pip install miniwob")
TASK = {"question": "Follow the instruction on the page.", "task": "click-test", "seed": 7}
INSTRUCTION = 50 / 210
"""Share of the height that shows the instruction."""


@pytest.mark.parametrize("action_format", GUI_FORMATS)
async def test_button_is_found_in_the_screenshot_and_clicked(action_format: str) -> None:
    def act(request: Request) -> Completion:
        """Look, then click on the middle of what is drawn below the instruction, as a model that sees would."""
        images = [image for message in request.messages for image in message.images]
        call = ToolCall("screenshot")
        if images:
            pixels = open_image(images[-1]).convert("L").point(lambda level: 255 * (level < 250))
            width, height = pixels.size
            top = round(INSTRUCTION * height) + 2
            left, upper, right, lower = pixels.crop((0, top, width, height)).getbbox()
            x, y = (left + right) / 2, top + (upper + lower) / 2
            unit = (1, 1) if agent.format.coordinates == "pixels" else (1000 / width, 1000 / height)
            call = ToolCall("click_at", {"x": round(x * unit[0]), "y": round(y * unit[1])})
        message = Message("assistant", agent.format.write(call))
        return Completion((), (), (), FinishReason.STOP, message=message)

    agent = GUIAgent(tools=[MiniWoB], reward=miniwob_reward, action_format=action_format, backend=Server(act))
    (chain,) = await agent.run(TASK)
    await agent.close()
    assert (chain.stop, chain.reward) == (StopReason.TOOL_END, 1.0)
    assert len(chain.turns) == 2


async def test_expert_demonstrates_in_the_format_of_the_model() -> None:
    agent = GUIAgent(
        tools=[MiniWoB],
        reward=miniwob_reward,
        action_format="ui-tars",
        template="chatml",
        backend="scripted",
        backend_config={"script": "-"},
    )
    demonstrations = await demonstrate(agent, [{**TASK, "task": "enter-text"}], threshold=1)
    await agent.close()
    assert not demonstrations.reasons
    replies = [message.text for message in demonstrations.accepted[0].messages if message.role == "assistant"]
    assert [reply.partition("Action: ")[2].partition("(")[0] for reply in replies] == ["wait", "click", "type", "click"]
