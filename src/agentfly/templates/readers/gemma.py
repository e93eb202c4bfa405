"""Gemma: a `tool_code` fence with Python calls, a `json` fence with a call object, or either unfenced.

Gemma has no marks for calls: the prompt says which form to use, and this reads each of the usual ones. Any
other fence, and JSON without the keys of a call, is part of the answer.
"""

from __future__ import annotations

from agentfly.templates.readers import llama_json, llama_pythonic
from agentfly.templates.readers.turn import Block, Turn

read = Turn(
    Block("```tool_code", "```", llama_pythonic.read_python, "```tool_code\nNAME(key=1)\n```"),
    Block("```json", "```", llama_json.read_if_call, f"```json\n{llama_json.EXAMPLE}\n```"),
    llama_pythonic.FENCE,
    Block(llama_pythonic.BARE, None, llama_pythonic.read_python, llama_pythonic.EXAMPLE),
    Block(llama_json.BARE, "", llama_json.read_if_call, llama_json.EXAMPLE),
    hint="`[{<",
)
