"""Action formats of GUI models: how a model writes clicks, keys and text, as calls of the tools of a screen.

    ui-tars, ui-tars-1.5     Thought: …  Action: click(start_box='(120,340)')
    qwen2.5-vl, qwen3-vl     <tool_call>{"name": "computer_use", "arguments": {"action": "left_click", …}}</tool_call>

A parser never raises: what it cannot parse is reported to the model in `Reply.problems`, with the correct form, and no
action of that reply is run. Tools that are not actions of a screen are called by their own names in the same syntax.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from agentfly.errors import ConfigError
from agentfly.templates.parsers.pythonic import parse_python_calls
from agentfly.templates.parsers.registry import PARSERS
from agentfly.tooling import Tool
from agentfly.types import Message, Reply, ToolCall
from agentfly.vision.images import COORDINATE_MAX

Coordinates = Literal["pixels", "thousandths"]
SCREEN_TOOLS: dict[str, tuple[str, ...]] = {
    "click_at": ("x", "y"),
    "double_click_at": ("x", "y"),
    "right_click_at": ("x", "y"),
    "drag": ("x", "y", "to_x", "to_y"),
    "type_text": ("text",),
    "press_key": ("key",),
    "scroll": ("down", "x", "y"),
    "screenshot": (),
}
"""The tools of a screen that actions call, with their parameters; an environment has any of them."""
_SCROLL_STEP = COORDINATE_MAX // 2
_KEYS = {
    "return": "Enter", "esc": "Escape", "del": "Delete", "up": "ArrowUp", "down": "ArrowDown", "left": "ArrowLeft",
    "right": "ArrowRight", "page_up": "PageUp", "page_down": "PageDown",
} | {
    key.lower(): key
    for key in ("Enter", "Tab", "Escape", "Backspace", "Delete", "ArrowUp", "ArrowDown", "ArrowLeft", "ArrowRight",
                "Home", "End", "PageUp", "PageDown", "Space")
}  # fmt: skip
"""Names that models give to keys, and the names of the DOM."""
_MAX_MEASURE = 1e6
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


class _ActionError(ValueError):
    """An action that cannot be parsed; the message is shown to the model."""


class GUIFormat(ABC):
    """Describes, parses and writes the actions of one family of models, for the tools of one agent."""

    prompt: ClassVar[str]
    """The system prompt; `{tools}` is replaced by the description of the actions."""
    nudge: ClassVar[str]
    """Shown after a reply without an action."""
    actions: ClassVar[Mapping[str, str]]
    """The tool that each action calls; "" for actions that end the chain."""
    measures: ClassVar[tuple[str, ...]] = ("x", "y", "to_x", "to_y")
    """Arguments of screen tools that the model writes in its unit."""

    def __init__(self, tools: Sequence[Tool], coordinates: Coordinates) -> None:
        self.coordinates = coordinates
        """The unit in which the model writes points: pixels of the image that it was last shown, or thousandths."""
        names = {tool.name for tool in tools if tool.name in SCREEN_TOOLS}
        self.available = [action for action, tool in self.actions.items() if not tool or tool in names]
        """The actions that this agent's tools can carry out."""
        self.other_tools = [tool for tool in tools if tool.name not in SCREEN_TOOLS]

    @abstractmethod
    def describe(self) -> str:
        """The actions and the other tools, for the system prompt."""

    @abstractmethod
    def parse(self, text: str) -> Reply:
        """Parse one turn into calls of tools, with points in the model's own unit. The content is the whole text."""

    @abstractmethod
    def write(self, action: ToolCall | str) -> str:
        """A turn that makes a call or gives the final answer; the inverse of `parse`."""

    def _build_reply(
        self, text: str, thinking: str, calls: Sequence[ToolCall], problems: Sequence[str], example: str
    ) -> Reply:
        """Convert the actions of a turn; an action that ends the chain gives the answer."""
        converted: list[ToolCall] = []
        all_problems = list(problems)
        answer = None
        for call in calls:
            try:
                if call.problem:
                    raise _ActionError(f"{call.name or 'the action'}: {call.problem}")
                result = self._convert(call)
            except _ActionError as error:
                all_problems.append(f"{error}; write {example}" if "; write " not in str(error) else str(error))
                continue
            if isinstance(result, str):
                answer = result
                break
            converted.append(result)
        if all_problems:
            return Reply(Message("assistant", text, thinking=thinking), problems=tuple(dict.fromkeys(all_problems)))
        return Reply(Message("assistant", text, tuple(converted), thinking), answer)

    @abstractmethod
    def _convert(self, call: ToolCall) -> ToolCall | str:
        """Convert an action to a call of a tool, or to the final answer. Raises _ActionError."""

    def _require_tool(self, action: str) -> str:
        """The tool of an action. Raises _ActionError if there is none."""
        if action not in self.available:
            available_names = [*self.available, *(tool.name for tool in self.other_tools)]
            raise _ActionError(f"there is no action {action!r:.40}; there are {', '.join(available_names)}")
        return self.actions[action]


def _require_argument(call: ToolCall, *names: str) -> Any:
    """The argument of an action under the first of these names that it has. Raises _ActionError if it has none."""
    for name in names:
        if name in call.arguments:
            return call.arguments[name]
    raise _ActionError(f"{call.name} has no {names[0]!r}")


def _parse_point(value: object, what: str) -> tuple[float, float]:
    """A point from `(x,y)`, `[x, y]`, `<point>x y</point>` or a list; the center of a box of four numbers."""
    numbers = [float(number) for number in _NUMBER.findall(value)] if isinstance(value, str) else value
    if not isinstance(numbers, list) or len(numbers) not in (2, 4) or not all(_is_measure(n) for n in numbers):
        raise _ActionError(f"{what} is {value!r:.60}, not a point with x and y")
    if len(numbers) == 4:
        numbers = [(numbers[0] + numbers[2]) / 2, (numbers[1] + numbers[3]) / 2]
    return numbers[0], numbers[1]


def _is_measure(value: object) -> bool:
    """Whether a value is a number of a plausible size; `true` is not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _MAX_MEASURE


def _normalize_key(key: object) -> str:
    """The DOM name of a key; an unknown name stays as it is."""
    return _KEYS.get(str(key).strip().lower(), str(key))


class UITarsFormat(GUIFormat):
    """`Thought: …` and `Action: …`, with actions written as Python calls."""

    prompt = (
        "You operate a screen, which you see in screenshots. In each turn, write\n"
        "Thought: <what to do next, and with which element>\nAction: <one action>\n\n"
        "## Action Space\n{tools}\n\n"
        "A new screenshot follows each action. If you have not seen the screen yet, write wait()."
    )
    nudge = "Write\nThought: <what to do next>\nAction: <one action, such as click(start_box='(x,y)')>"
    _FORMS: ClassVar[Mapping[str, tuple[str, str]]] = {
        "click": ("click_at", "click(start_box='(x,y)')"),
        "left_double": ("double_click_at", "left_double(start_box='(x,y)')"),
        "right_single": ("right_click_at", "right_single(start_box='(x,y)')"),
        "drag": ("drag", "drag(start_box='(x,y)', end_box='(x,y)')"),
        "hotkey": ("press_key", "hotkey(key='enter')"),
        "type": ("type_text", "type(content='text') # escape quotes and line breaks; a \\n at the end submits"),
        "scroll": ("scroll", "scroll(start_box='(x,y)', direction='down or up')"),
        "wait": ("screenshot", "wait() # look at the screen again"),
        "finished": ("", "finished(content='answer') # the task is done"),
    }
    """The tool that each action calls, and how the action is written."""
    actions: ClassVar[Mapping[str, str]] = {action: tool for action, (tool, _) in _FORMS.items()}
    _ACTION: ClassVar[re.Pattern[str]] = re.compile(r"^[ \t]*Action:[ \t]*", re.MULTILINE)
    _THOUGHT: ClassVar[re.Pattern[str]] = re.compile(r"^[ \t]*Thought:[ \t]*", re.MULTILINE)

    def __init__(self, tools: Sequence[Tool], coordinates: Coordinates) -> None:
        super().__init__(tools, coordinates)
        if taken := [tool.reference for tool in self.other_tools if tool.name in self.actions]:
            raise ConfigError(f"{taken[0]} has the name of an action of this format; leave it out of the agent's tools")

    def describe(self) -> str:
        tool_lines = []
        for tool in self.other_tools:
            parameters = ", ".join(f"{name}=…" for name in tool.arguments.schema["properties"])
            tool_lines.append(f"{tool.name}({parameters}) # {tool.schema['function']['description']}")
        return "\n".join([*(self._FORMS[action][1] for action in self.available), *tool_lines])

    def parse(self, text: str) -> Reply:
        """Parse the actions after the first `Action:`. A reply without one has no call."""
        action = self._ACTION.search(text)
        prose = text[: action.start()] if action else text
        thought = self._THOUGHT.search(prose)
        thinking = prose[thought.end() :].strip() if thought else ""
        if action is None:
            return Reply(Message("assistant", text, thinking=thinking))
        example = f"Action: {self._FORMS[self.available[0]][1].partition(' #')[0]}"
        return self._build_reply(text, thinking, parse_python_calls(text[action.end() :]), (), example)

    def _convert(self, call: ToolCall) -> ToolCall | str:
        arguments = call.arguments
        if any(call.name == tool.name for tool in self.other_tools):
            return call
        tool = self._require_tool("finished" if call.name == "call_user" else call.name)
        if tool == "":
            return str(arguments.get("content", ""))
        if tool == "type_text":
            return ToolCall(tool, {"text": str(_require_argument(call, "content"))})
        if tool == "press_key":
            return ToolCall(tool, {"key": _normalize_key(_require_argument(call, "key"))})
        if tool == "screenshot":
            return ToolCall(tool)
        x, y = _parse_point(_require_argument(call, "start_box", "point", "start_point"), "start_box")
        if tool == "drag":
            to_x, to_y = _parse_point(_require_argument(call, "end_box", "end_point"), "end_box")
            return ToolCall(tool, {"x": x, "y": y, "to_x": to_x, "to_y": to_y})
        if tool == "scroll":
            direction = _require_argument(call, "direction")
            if direction not in ("down", "up"):
                raise _ActionError(f"the direction is {direction!r:.40}, not 'down' or 'up'")
            # The format has no amount: half of the screen.
            return ToolCall(tool, {"x": x, "y": y, "down": _SCROLL_STEP if direction == "down" else -_SCROLL_STEP})
        return ToolCall(tool, {"x": x, "y": y})

    def write(self, action: ToolCall | str) -> str:
        if isinstance(action, str):
            return f"Thought: \nAction: finished(content={action!r})"
        return f"Thought: \nAction: {self._write_call(action)}"

    def _write_call(self, call: ToolCall) -> str:
        arguments = dict(call.arguments)
        point = f"'({arguments.get('x')},{arguments.get('y')})'"
        match call.name:
            case "type_text":
                return f"type(content={arguments['text']!r})"
            case "press_key":
                return f"hotkey(key={arguments['key'].lower()!r})"
            case "screenshot":
                return "wait()"
            case "scroll":
                return f"scroll(start_box={point}, direction={'down' if arguments['down'] > 0 else 'up'!r})"
            case "drag":
                return f"drag(start_box={point}, end_box='({arguments['to_x']},{arguments['to_y']})')"
            case "click_at" | "double_click_at" | "right_click_at":
                name = next(action for action, tool in self.actions.items() if tool == call.name)
                return f"{name}(start_box={point})"
            case _:
                return f"{call.name}({', '.join(f'{name}={value!r}' for name, value in arguments.items())})"


class QwenFormat(GUIFormat):
    """Calls of the function `computer_use` as JSON between `<tool_call>` tags."""

    prompt = (
        "You operate a screen, which you see in screenshots.\n\n# Tools\n\n"
        "You may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n{tools}\n</tools>\n\n"
        "For each function call, return a json object with function name and arguments within <tool_call></tool_call> "
        'XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>\n\n'
        "A new screenshot follows each action. If you have not seen the screen yet, use the action wait."
    )
    _EXAMPLE = (
        '<tool_call>{"name": "computer_use", "arguments": {"action": "left_click", "coordinate": [x, y]}}</tool_call>'
    )
    nudge = f"Write one call, such as\n{_EXAMPLE}"
    actions: ClassVar[Mapping[str, str]] = {
        "left_click": "click_at",
        "double_click": "double_click_at",
        "right_click": "right_click_at",
        "left_click_drag": "drag",
        "type": "type_text",
        "key": "press_key",
        "scroll": "scroll",
        "wait": "screenshot",
        "answer": "",
        "terminate": "",
    }
    measures = (*GUIFormat.measures, "down")

    def describe(self) -> str:
        unit = "pixels" if self.coordinates == "pixels" else f"thousandths of its size, 0 to {COORDINATE_MAX}"
        point = {"type": "array", "items": {"type": "number"}}
        properties: dict[str, Any] = {
            "action": {"type": "string", "enum": self.available, "description": "The action to perform."},
            "coordinate": {**point, "description": f"[x, y] of a point of the screenshot, in {unit}. For clicks."},
            "text": {"type": "string", "description": "For `type` and `answer`."},
            "keys": {"type": "array", "items": {"type": "string"}, "description": "For `key`: the key to press."},
            "pixels": {"type": "number", "description": "For `scroll`: how far; positive is up, negative is down."},
            "status": {"type": "string", "enum": ["success", "failure"], "description": "For `terminate`."},
        }
        if "left_click_drag" in self.available:
            properties["start_coordinate"] = {**point, "description": "[x, y] where a drag starts."}
        function = {
            "name": "computer_use",
            "description": "Use a mouse and keyboard on the screen. `wait` shows it again, `terminate` ends the task.",
            "parameters": {"type": "object", "properties": properties, "required": ["action"]},
        }
        schemas = [{"type": "function", "function": function}, *(tool.schema for tool in self.other_tools)]
        return "\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas)

    def parse(self, text: str) -> Reply:
        """Parse the calls of a turn. A reply without one has no call."""
        reply = PARSERS["hermes"](text)
        return self._build_reply(text, reply.message.thinking, reply.calls, reply.problems, self._EXAMPLE)

    def _convert(self, call: ToolCall) -> ToolCall | str:
        if call.name != "computer_use":
            if any(call.name == tool.name for tool in self.other_tools):
                return call
            names = ", ".join(["computer_use", *(tool.name for tool in self.other_tools)])
            raise _ActionError(f"there is no function {call.name!r:.40}; there are {names}")
        arguments = call.arguments
        action = str(_require_argument(call, "action"))
        tool = self._require_tool(action)
        if tool == "":
            return str(arguments.get("text" if action == "answer" else "status", ""))
        if tool == "type_text":
            return ToolCall(tool, {"text": str(_require_argument(call, "text"))})
        if tool == "press_key":
            keys = _require_argument(call, "keys")
            pressed = keys if isinstance(keys, list) else [keys]
            return ToolCall(tool, {"key": "+".join(map(_normalize_key, pressed))})
        if tool == "screenshot":
            return ToolCall(tool)
        if tool == "scroll":
            amount = _require_argument(call, "pixels")
            if not _is_measure(amount):
                raise _ActionError(f"'pixels' is {amount!r:.40}, not a number")
            at = arguments.get("coordinate")
            point = {} if at is None else dict(zip("xy", _parse_point(at, "'coordinate'"), strict=True))
            return ToolCall(tool, {**point, "down": -amount})
        x, y = _parse_point(_require_argument(call, "coordinate"), "'coordinate'")
        if tool == "drag":
            from_x, from_y = _parse_point(_require_argument(call, "start_coordinate"), "'start_coordinate'")
            return ToolCall(tool, {"x": from_x, "y": from_y, "to_x": x, "to_y": y})
        return ToolCall(tool, {"x": x, "y": y})

    def write(self, action: ToolCall | str) -> str:
        call = ToolCall("", {"text": action}) if isinstance(action, str) else action
        arguments: dict[str, Any] = dict(call.arguments)
        name = "computer_use"
        match call.name:
            case "":
                arguments = {"action": "answer", **arguments}
            case "type_text":
                arguments = {"action": "type", "text": arguments["text"]}
            case "press_key":
                arguments = {"action": "key", "keys": arguments["key"].split("+")}
            case "screenshot":
                arguments = {"action": "wait"}
            case "scroll":
                arguments = {
                    "action": "scroll",
                    "coordinate": [arguments["x"], arguments["y"]],
                    "pixels": -arguments["down"],
                }
            case "drag":
                start, end = [arguments["x"], arguments["y"]], [arguments["to_x"], arguments["to_y"]]
                arguments = {"action": "left_click_drag", "start_coordinate": start, "coordinate": end}
            case "click_at" | "double_click_at" | "right_click_at":
                click = next(name for name, tool in self.actions.items() if tool == call.name)
                arguments = {"action": click, "coordinate": [arguments["x"], arguments["y"]]}
            case _:
                name = call.name
        written = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
        return f"<tool_call>\n{written}\n</tool_call>"


GUI_FORMATS: dict[str, tuple[type[GUIFormat], Coordinates]] = {
    "ui-tars": (UITarsFormat, "thousandths"),
    "ui-tars-1.5": (UITarsFormat, "pixels"),
    "qwen2.5-vl": (QwenFormat, "pixels"),
    "qwen3-vl": (QwenFormat, "thousandths"),
}
"""By name: how actions are written, and the unit of their points."""
