"""GUI formats: actions as tool calls and back, malformed actions, and the conversion of points."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from agentfly import tool
from agentfly.agents import GUIAgent, VisionAgent
from agentfly.agents.gui_formats import GUI_FORMATS
from agentfly.errors import ConfigError
from agentfly.tooling import Tool
from agentfly.trajectory import CallStatus, StopReason
from agentfly.types import Image, Message, ToolCall
from agentfly.vision.images import open_image
from tests.fakes import PNG, Recording, Server, complete_with

pillow = pytest.importorskip("PIL.Image", reason="the extra vision is not installed")
CALLS: list[tuple[Any, ...]] = []
SIZE = (160, 210)


def shoot() -> dict[str, Any]:
    return {"observation": "", "image": pillow.new("RGB", SIZE, "white")}


@tool
async def screenshot() -> dict[str, Any]:
    """Look at the screen."""
    return shoot()


@tool
async def click_at(x: int, y: int) -> dict[str, Any]:
    """Click."""
    CALLS.append(("click_at", x, y))
    return shoot()


@tool
async def right_click_at(x: int, y: int) -> str:
    """Click with the right button."""
    return "menu"


@tool
async def double_click_at(x: int, y: int) -> str:
    """Click twice."""
    return "open"


@tool
async def drag(x: int, y: int, to_x: int, to_y: int) -> str:
    """Drag."""
    return "dragged"


@tool
async def type_text(text: str) -> str:
    """Type."""
    return text


@tool
async def press_key(key: str) -> str:
    """Press a key."""
    return key


@tool
async def scroll(down: int, x: int = 500, y: int = 500) -> str:
    """Scroll."""
    CALLS.append(("scroll", down, x, y))
    return "scrolled"


@tool
async def lookup(word: str) -> str:
    """Look up a word."""
    return word


TOOLS: list[Tool] = [
    screenshot, click_at, right_click_at, double_click_at, drag, type_text, press_key, scroll, lookup
]  # fmt: skip


def gui(action_format: str, replies: list[str] | None = None, tools: Any = TOOLS) -> GUIAgent:
    return GUIAgent(tools=tools, action_format=action_format, backend=Server(complete_with(*(replies or ["-"]))))


@pytest.mark.parametrize("action_format", GUI_FORMATS)
@pytest.mark.parametrize(
    "call",
    [
        ToolCall("click_at", {"x": 12, "y": 34}),
        ToolCall("double_click_at", {"x": 0, "y": 1000}),
        ToolCall("right_click_at", {"x": 12, "y": 34}),
        ToolCall("drag", {"x": 1, "y": 2, "to_x": 3, "to_y": 4}),
        ToolCall("type_text", {"text": 'it\'s "x"\n </tool_call> é\\'}),
        ToolCall("press_key", {"key": "ArrowUp"}),
        ToolCall("scroll", {"x": 5, "y": 6, "down": -500}),
        ToolCall("screenshot"),
        ToolCall("lookup", {"word": "Action: click()"}),
    ],
    ids=lambda call: call.name,
)
def test_written_calls_are_parsed_back(action_format: str, call: ToolCall) -> None:
    agent_format = gui(action_format).format
    text = agent_format.write(call)
    reply = agent_format.parse(text)
    assert [(call.name, dict(call.arguments), call.problem) for call in reply.calls] == [
        (call.name, dict(call.arguments), "")
    ]
    assert (reply.message.text, reply.problems, reply.answer) == (text, (), None)
    assert agent_format.parse(agent_format.write("4 'two'")).answer == "4 'two'"


@pytest.mark.parametrize(
    "action",
    [
        "click(start_box='(30,40)')",
        "click(start_box='<|box_start|>(30,40)<|box_end|>')",
        "click(start_box='[20, 30, 40, 50]')",
        "click(point='<point>30 40</point>')",
    ],
)
def test_ui_tars_writes_points_in_several_ways(action: str) -> None:
    reply = gui("ui-tars").parse(f"Thought: the button\nAction: {action}")
    assert [(call.name, dict(call.arguments)) for call in reply.calls] == [("click_at", {"x": 30, "y": 40})]
    assert reply.message.thinking == "the button"


@pytest.mark.parametrize(
    ("action_format", "text", "problem"),
    [
        ("ui-tars", "Action: click(start_box='here')", "start_box is 'here', not a point"),
        ("ui-tars", "Action: click()", "click has no 'start_box'"),
        ("ui-tars", "Action: click(start_box='(1,2)'", "it is not Python"),
        ("ui-tars", "Action: fly(content='x')", "there is no action 'fly'; there are click, "),
        ("ui-tars", "Action: scroll(start_box='(1,2)', direction='left')", "not 'down' or 'up'"),
        ("ui-tars", "Action: ", "it holds no call"),
        ("ui-tars", f"Action: click(start_box='({'9' * 400},2)')", "not a point with x and y"),
        ("qwen3-vl", "<tool_call>{}</tool_call>", 'has no "name"'),
        ("qwen3-vl", '<tool_call>{"name": "computer_use", "arguments": {}}</tool_call>', "has no 'action'"),
        (
            "qwen3-vl",
            '<tool_call>{"name": "computer_use", "arguments": {"action": "left_click", "coordinate": [1]}}</tool_call>',
            "not a point with x and y",
        ),
        ("qwen3-vl", '<tool_call>{"name": "click", "arguments": {}}</tool_call>', "there is no function 'click'"),
        ("qwen3-vl", '<tool_call>{"name": "computer_use"', "not JSON"),
    ],
)
async def test_malformed_actions_are_answered(action_format: str, text: str, problem: str) -> None:
    agent = gui(action_format, [text, gui(action_format).format.write("done")])
    (chain,) = await agent.run("Go.")
    observation = chain.messages[-2]
    assert observation.role == "user"
    assert problem in observation.text
    assert "; write " in observation.text or "; there are " in observation.text
    assert (chain.stop, chain.prediction) == (StopReason.ANSWER, "done")


@pytest.mark.parametrize(
    ("action_format", "point", "screen_point"),
    [
        # A server resizes images to multiples of 28 pixels: 160 × 210 is sent as 168 × 224.
        ("ui-tars-1.5", (42, 56), (168, 224)),
        ("qwen2.5-vl", (42, 56), (168, 224)),
        ("ui-tars", (250, 250), SIZE),
        ("qwen3-vl", (250, 250), SIZE),
    ],
)
async def test_points_are_converted_to_thousandths_of_the_image_shown(
    action_format: str, point: tuple[int, int], screen_point: tuple[int, int]
) -> None:
    CALLS.clear()
    write = gui(action_format).format.write
    script = [write(ToolCall("screenshot")), write(ToolCall("click_at", {"x": point[0], "y": point[1]})), write("ok")]
    agent = gui(action_format, script)
    (chain,) = await agent.run("Go.")
    assert CALLS == [("click_at", 250, 250)]
    assert isinstance(agent.backend, Server)
    assert open_image(agent.backend.requests[-1].messages[-1].images[-1]).size == screen_point
    assert [message.text for message in chain.messages if message.role == "assistant"] == script
    assert [call.status for call in chain.calls] == [CallStatus.OK] * 2


async def test_a_pixel_without_an_image_is_answered() -> None:
    write = gui("qwen2.5-vl").format.write
    agent = gui("qwen2.5-vl", [write(ToolCall("click_at", {"x": 1, "y": 1})), write("ok")])
    (chain,) = await agent.run("Go.")
    assert "no screenshot has been shown yet" in chain.messages[-2].text


async def test_scrolling_without_a_point_and_in_pixels() -> None:
    CALLS.clear()
    call = '<tool_call>{"name": "computer_use", "arguments": {"action": "scroll", "pixels": -112}}</tool_call>'
    write = gui("qwen2.5-vl").format.write
    await gui("qwen2.5-vl", [write(ToolCall("screenshot")), call, write("ok")]).run("Go.")
    assert CALLS == [("scroll", 500, 500, 500)]


def test_only_actions_with_a_tool_are_offered() -> None:
    for name in GUI_FORMATS:
        agent = gui(name, tools=[click_at, lookup])
        assert "click" in agent.system_prompt
        assert "lookup" in agent.system_prompt
        assert "drag" not in agent.system_prompt
        assert "{tools}" not in agent.system_prompt


@tool
async def click(label: str) -> str:
    """Click on a label."""
    return label


@pytest.mark.parametrize(
    ("build", "problem"),
    [
        (lambda: gui("uitars"), "did you mean 'ui-tars'?"),
        (lambda: gui("ui-tars", tools=[lookup]), "its tools are lookup"),
        (lambda: gui("ui-tars", tools=[click_at, click]), "the name of an action"),
    ],
)
def test_bad_settings_are_rejected(build: Callable[[], GUIAgent], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem.replace("?", r"\?")):
        build()


async def test_vision_agent_rejects_a_model_that_cannot_see() -> None:
    blind = Recording("-")
    blind.supports_images = False
    with pytest.raises(ConfigError, match="'bytes' is not: its backend or its model takes no images"):
        VisionAgent(template="chatml", backend=blind)
    agent = VisionAgent(tools=[screenshot], backend=Server(complete_with("It is red.")))
    (chain,) = await agent.run({"question": "What color?", "image": f"data:image/png;base64,{PNG}"})
    assert chain.prediction == "It is red."
    assert chain.messages[0].images == (Image(f"data:image/png;base64,{PNG}"),)
    assert isinstance(chain.messages[0], Message)
