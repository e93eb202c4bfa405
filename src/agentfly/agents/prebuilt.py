"""The prebuilt agents.

`HFAgent` uses the native function calling of the model. The others describe their tools in the prompt, find calls in
the text of a reply, and pass tool results on as user messages.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from agentfly.agent import BaseAgent
from agentfly.errors import ConfigError
from agentfly.rollout.limits import RecoveryRule
from agentfly.templates.parsers.calls import parse_json
from agentfly.tooling import ToolResult
from agentfly.types import Image, Message, Reply, ToolCall

_CODE_OPENING = re.compile(r"```(?:python|py)[ \t]*\n|<code>\n?")
_FORM = "Action: <tool>\nInput: <arguments as a JSON object>"
_ACTION = re.compile(r"^[ \t]*Action:[ \t]*(.*)$", re.MULTILINE)
_INPUT = re.compile(r"^[ \t]*(?:Action )?Input:[ \t]*", re.MULTILINE)
_FINAL = re.compile(r"^[ \t]*Final Answer:[ \t]*", re.MULTILINE)
_THOUGHT = re.compile(r"^[ \t]*Thought:[ \t]*", re.MULTILINE)
_INVENTED = re.compile(r"^[ \t]*Observation:", re.MULTILINE)


class HFAgent(BaseAgent):
    """The chat template renders the tools and its parser finds the calls. A reply without a call is the answer."""


def split_thinking(text: str) -> tuple[str, str]:
    """Split a turn into the thinking at its start and the rest. Calls inside thinking are ignored."""
    if not text.lstrip().startswith("<think>"):
        return "", text
    thinking, _, content = text.partition("<think>")[2].partition("</think>")
    return thinking.strip(), content


class PromptedAgent(BaseAgent):
    """An agent whose calls are plain text in a form that its system prompt explains."""

    native_tools = False
    observation_form = "{observation}"
    """The text of a tool result in the user message."""

    def history_message(self, message: Message) -> Message:
        """The text as sampled, without tool calls, which the chat template would render in another format."""
        return Message("assistant", message.content)

    def observe(self, calls: Sequence[ToolCall], results: Sequence[ToolResult]) -> Sequence[Message]:
        if not results:
            return []
        content: list[str | Image] = []
        for result in results:
            visible = self.visible(result.observation)
            visible_pieces = visible if isinstance(visible, tuple) else (visible,)
            text = "".join(piece for piece in visible_pieces if isinstance(piece, str))
            content.append(self.observation_form.replace("{observation}", text))
            content += [piece for piece in visible_pieces if isinstance(piece, Image)]
        if all(isinstance(piece, str) for piece in content):
            return [Message("user", "\n".join(str(piece) for piece in content))]
        return [Message("user", tuple(content))]


class ReactAgent(PromptedAgent):
    """Parses `Thought:`, `Action:`, `Input:` and `Final Answer:`. One action per turn."""

    default_system_prompt = (
        "Solve the task step by step with these tools:\n{tools}\n\n"
        f"In each turn, write\nThought: <what to do next>\n{_FORM}\n"
        "and stop: the observation comes in the next turn. When you know the answer, write\n"
        "Thought: <why>\nFinal Answer: <the answer>"
    )
    default_on_no_call = RecoveryRule(nudge=f"Write either\n{_FORM}\nor\nFinal Answer: <the answer>", limit=2)
    observation_form = "Observation: {observation}"

    def parse(self, text: str) -> Reply:
        """Parse the first action or final answer; text after an action (an invented observation) is ignored."""
        thinking, content = split_thinking(text)
        action, final = _ACTION.search(content), _FINAL.search(content)
        first = min([m.start() for m in (action, final) if m], default=len(content))
        start = _THOUGHT.search(content, 0, first)
        thought = "\n".join(filter(None, (thinking, content[start.end() : first].strip() if start else "")))
        if final and final.start() == first:
            return Reply(Message("assistant", text, thinking=thought), answer=content[final.end() :].strip())
        if not action:
            return Reply(Message("assistant", text, thinking=thought))
        return Reply(
            Message("assistant", text, (self._parse_call(action[1].strip(), content[action.end() :]),), thought)
        )

    def _parse_call(self, name: str, text: str) -> ToolCall:
        input_match = _INPUT.search(text)
        if input_match is None:
            takes = next((t.arguments.schema["properties"] for t in self.toolbox if t.name == name), None)
            return ToolCall(name, problem="" if takes == {} else "there is no 'Input:' line after the action")
        source = text[input_match.end() :].lstrip()
        raw = _INVENTED.split(source, maxsplit=1)[0].strip()
        arguments, _, problem = parse_json(source)
        if problem:
            return ToolCall(name, problem=f"its input is not a JSON object: {problem}", raw=raw)
        if not isinstance(arguments, dict):
            return ToolCall(name, problem="its input is not a JSON object", raw=raw)
        return ToolCall(name, arguments)


class _TextToolAgent(PromptedAgent):
    """An agent with one tool, which takes one text."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        name = type(self).__name__
        tools = list(self.toolbox)
        if len(tools) != 1:
            names = ", ".join(self.toolbox.names) or "none"
            raise ConfigError(f"{name} takes exactly one tool, not {len(tools)} ({names})")
        schema = tools[0].arguments.schema
        parameters = schema.get("required") or list(schema["properties"])[:1]
        if len(parameters) != 1 or schema["properties"][parameters[0]].get("type", "string") != "string":
            takes = ", ".join(schema["properties"]) or "nothing"
            raise ConfigError(f"{name} passes its tool one text; {tools[0].name!r} takes {takes}")
        self._tool = tools[0].name
        self._parameter = parameters[0]


class CodeAgent(_TextToolAgent):
    """Runs the first fenced or tagged block of a reply. A reply without one is the answer."""

    default_system_prompt = (
        "Solve the task by writing Python. Put the code to run in one block\n```python\n…\n```\n"
        "and stop: what it prints comes in the next turn. When you know the answer, write it without a code block."
    )
    observation_form = "Output:\n{observation}"

    def parse(self, text: str) -> Reply:
        """Parse the first code block as a call of the code tool."""
        thinking, content = split_thinking(text)
        blocks = list(_CODE_OPENING.finditer(content))
        last = {closing: content.rfind(closing) for closing in ("```", "</code>")}
        for opened in blocks:
            closing = "```" if opened[0].startswith("`") else "</code>"
            if opened.end() <= last[closing]:
                code = content[opened.end() : content.find(closing, opened.end())]
                return Reply(Message("assistant", text, (ToolCall(self._tool, {self._parameter: code}),), thinking))
        if blocks:
            unclosed = ToolCall(self._tool, problem="the code block is not closed", raw=content[blocks[0].start() :])
            return Reply(Message("assistant", text, (unclosed,), thinking))
        return Reply(Message("assistant", text, (), thinking), answer=(content.strip() or None) if thinking else None)


class ActionAgent(_TextToolAgent):
    """Parses `<think>…</think><action>…</action>` and passes the text of the action to the only tool."""

    default_system_prompt = (
        "Think about what to do next between <think> and </think>, then write one action between <action> and "
        "</action>."
    )
    default_on_no_call = RecoveryRule(nudge="Write one action between <action> and </action>.", limit=2)

    def parse(self, text: str) -> Reply:
        """Parse the first action after the thinking."""
        thinking, closed, content = text.partition("<think>")[2].partition("</think>")
        if not closed:
            thinking, content = "", text
        _, opened, after_tag = content.partition("<action>")
        if not opened:
            return Reply(Message("assistant", text, thinking=thinking.strip()))
        action, closed, _ = after_tag.partition("</action>")
        call = ToolCall(self._tool, {self._parameter: action.strip()})
        if not closed:
            call = ToolCall(self._tool, problem="<action> is not closed by </action>", raw=text)
        return Reply(Message("assistant", text, (call,), thinking.strip()))
