"""What the agents share whose tools are described in the prompt: they are answered in a user's turn."""

from __future__ import annotations

from collections.abc import Sequence

from agentfly.agent import BaseAgent
from agentfly.tooling import ToolResult
from agentfly.types import Image, Message, ToolCall


def split_thinking(text: str) -> tuple[str, str]:
    """The reasoning that a turn opens with, and what is said after it. Nothing is acted on that was only thought of."""
    if not text.lstrip().startswith("<think>"):
        return "", text
    thinking, _, said = text.partition("<think>")[2].partition("</think>")
    return thinking.strip(), said


class PromptedAgent(BaseAgent):
    """An agent whose calls are words in its text, in a form its system prompt explains."""

    native_tools = False
    observation_form = "{observation}"
    """How an answer reads in the user's turn."""

    def retell(self, said: Message) -> Message:
        """As the model wrote it: in the chat format's own words for calls it would be told something else."""
        return Message("assistant", said.content)

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
