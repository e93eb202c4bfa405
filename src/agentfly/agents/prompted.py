"""Base of the agents whose tools are described in the prompt; tool results are user messages."""

from __future__ import annotations

from collections.abc import Sequence

from agentfly.agent import BaseAgent
from agentfly.tooling import ToolResult
from agentfly.types import Image, Message, ToolCall


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
        parts: list[str | Image] = []
        for result in results:
            visible = self.visible(result.observation)
            shown = visible if isinstance(visible, tuple) else (visible,)
            text = "".join(part for part in shown if isinstance(part, str))
            parts.append(self.observation_form.replace("{observation}", text))
            parts += [part for part in shown if isinstance(part, Image)]
        if all(isinstance(part, str) for part in parts):
            return [Message("user", "\n".join(str(part) for part in parts))]
        return [Message("user", tuple(parts))]
