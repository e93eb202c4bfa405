"""One action per turn between tags, the usual format of text environments."""

from __future__ import annotations

from typing import Any

from agentfly.agents.code import require_text_tool
from agentfly.agents.prompted import PromptedAgent
from agentfly.rollout.limits import RecoveryRule
from agentfly.types import Message, Reply, ToolCall


class ActionAgent(PromptedAgent):
    """Parses `<think>…</think><action>…</action>` and passes the text of the action to the only tool."""

    default_system_prompt = (
        "Think about what to do next between <think> and </think>, then write one action between <action> and "
        "</action>."
    )
    default_on_no_call = RecoveryRule(nudge="Write one action between <action> and </action>.", limit=2)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._tool, self._parameter = require_text_tool(self)

    def parse(self, text: str) -> Reply:
        """Parse the first action after the thinking."""
        thinking, closed, content = text.partition("<think>")[2].partition("</think>")
        if not closed:
            thinking, content = "", text
        _, opened, rest = content.partition("<action>")
        if not opened:
            return Reply(Message("assistant", text, thinking=thinking.strip()))
        action, closed, _ = rest.partition("</action>")
        call = ToolCall(self._tool, {self._parameter: action.strip()})
        if not closed:
            call = ToolCall(self._tool, problem="<action> is not closed by </action>", raw=text)
        return Reply(Message("assistant", text, (call,), thinking.strip()))
