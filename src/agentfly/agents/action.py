"""One action a turn, between tags: the form that text worlds are played in."""

from __future__ import annotations

from typing import Any

from agentfly.agents.code import only_text_tool
from agentfly.agents.prompted import PromptedAgent
from agentfly.rollout.policy import Reaction
from agentfly.types import Message, Reply, ToolCall


class ActionAgent(PromptedAgent):
    """Reads `<think>…</think><action>…</action>` and hands the action's text to the one action tool."""

    default_system_prompt = (
        "Think about what to do next between <think> and </think>, then write one action between <action> and "
        "</action>."
    )
    default_on_no_call = Reaction(nudge="Write one action between <action> and </action>.", limit=2)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._tool, self._parameter = only_text_tool(self)

    def parse(self, text: str) -> Reply:
        """The first action after the thinking."""
        thinking, closed, said = text.partition("<think>")[2].partition("</think>")
        if not closed:
            thinking, said = "", text
        _, opened, rest = said.partition("<action>")
        if not opened:
            return Reply(Message("assistant", text, thinking=thinking.strip()))
        action, closed, _ = rest.partition("</action>")
        call = ToolCall(self._tool, {self._parameter: action.strip()})
        if not closed:
            call = ToolCall(self._tool, problem="<action> is not closed by </action>", raw=text)
        return Reply(Message("assistant", text, (call,), thinking.strip()))
