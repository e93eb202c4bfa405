"""Code as action: the model writes a code block and the code tool runs it."""

from __future__ import annotations

import re
from typing import Any

from agentfly.agents.prompted import PromptedAgent, split_thinking
from agentfly.errors import ConfigError
from agentfly.types import Message, Reply, ToolCall

_OPENING = re.compile(r"```(?:python|py)[ \t]*\n|<code>\n?")


class CodeAgent(PromptedAgent):
    """Runs the first fenced or tagged block of a reply. A reply without one is the answer."""

    default_system_prompt = (
        "Solve the task by writing Python. Put the code to run in one block\n```python\n…\n```\n"
        "and stop: what it prints comes in the next turn. When you know the answer, write it without a code block."
    )
    observation_form = "Output:\n{observation}"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._tool, self._parameter = require_text_tool(self)

    def parse(self, text: str) -> Reply:
        """Parse the first code block as a call of the code tool."""
        thinking, content = split_thinking(text)
        blocks = list(_OPENING.finditer(content))
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


def require_text_tool(agent: PromptedAgent) -> tuple[str, str]:
    """Return the name and the parameter of an agent's only tool. Raises ConfigError unless it takes one string."""
    name = type(agent).__name__
    tools = list(agent.toolbox)
    if len(tools) != 1:
        raise ConfigError(
            f"{name} takes exactly one tool, not {len(tools)} ({', '.join(agent.toolbox.names) or 'none'})"
        )
    schema = tools[0].arguments.schema
    parameters = schema.get("required") or list(schema["properties"])[:1]
    if len(parameters) != 1 or schema["properties"][parameters[0]].get("type", "string") != "string":
        takes = ", ".join(schema["properties"]) or "nothing"
        raise ConfigError(f"{name} passes its tool one text; {tools[0].name!r} takes {takes}")
    return tools[0].name, parameters[0]
