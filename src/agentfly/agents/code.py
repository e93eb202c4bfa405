"""Code as action: the model writes a block of code, and the code tool runs it."""

from __future__ import annotations

import re
from typing import Any

from agentfly.agents.prompted import PromptedAgent, split_thinking
from agentfly.errors import ConfigError
from agentfly.types import Message, Reply, ToolCall

_OPENED = re.compile(r"```(?:python|py)[ \t]*\n|<code>\n?")


class CodeAgent(PromptedAgent):
    """Runs the first fenced or tagged block of a reply. A reply without one is the answer."""

    default_system_prompt = (
        "Solve the task by writing Python. Put the code to run in one block\n```python\n…\n```\n"
        "and stop: what it prints comes in the next turn. When you know the answer, write it without a code block."
    )
    observation_form = "Output:\n{observation}"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._tool, self._parameter = only_text_tool(self)

    def parse(self, text: str) -> Reply:
        """The first block of code, as a call of the code tool."""
        thinking, said = split_thinking(text)
        blocks = list(_OPENED.finditer(said))
        last = {closing: said.rfind(closing) for closing in ("```", "</code>")}
        for opened in blocks:
            closing = "```" if opened[0].startswith("`") else "</code>"
            if opened.end() <= last[closing]:
                code = said[opened.end() : said.find(closing, opened.end())]
                return Reply(Message("assistant", text, (ToolCall(self._tool, {self._parameter: code}),), thinking))
        if blocks:
            unclosed = ToolCall(self._tool, problem="the code block is not closed", raw=said[blocks[0].start() :])
            return Reply(Message("assistant", text, (unclosed,), thinking))
        return Reply(Message("assistant", text, (), thinking), answer=(said.strip() or None) if thinking else None)


def only_text_tool(agent: PromptedAgent) -> tuple[str, str]:
    """The name and parameter of an agent's one tool, which takes one text."""
    name = type(agent).__name__
    tools = list(agent.toolbox)
    if len(tools) != 1:
        raise ConfigError(
            f"{name} takes exactly one tool, not {len(tools)} ({', '.join(agent.toolbox.names) or 'none'})"
        )
    schema = tools[0].arguments.schema
    wanted = schema.get("required") or list(schema["properties"])[:1]
    if len(wanted) != 1 or schema["properties"][wanted[0]].get("type", "string") != "string":
        takes = ", ".join(schema["properties"]) or "nothing"
        raise ConfigError(f"{name} hands its tool one text; {tools[0].name!r} takes {takes}")
    return tools[0].name, wanted[0]
