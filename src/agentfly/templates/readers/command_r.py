"""Command R: a JSON list of calls, in an `Action:` fence or, later, in `<|START_ACTION|>` and its end."""

from __future__ import annotations

from agentfly.templates.readers.calls import JsonCall
from agentfly.templates.readers.turn import Block, Turn

_JSON = JsonCall(name="tool_name", arguments=("parameters",), id="tool_call_id")
_LIST = '[{"tool_name": "…", "parameters": {…}}]'

read = Turn(
    Block(r"<\|START_ACTION\|>", "<|END_ACTION|>", _JSON.read_list, f"<|START_ACTION|>{_LIST}<|END_ACTION|>"),
    Block(r"Action:[ \t]*\n?```json", "```", _JSON.read_list, f"Action: ```json\n{_LIST}\n```"),
    thinking=("<|START_THINKING|>", "<|END_THINKING|>"),
    stray=r"<\|END_ACTION\|>",
    frame=r"<\|(?:START|END)_(?:RESPONSE|TEXT)\|>",
    hint="<`",
)
