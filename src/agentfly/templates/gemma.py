"""Gemma 2 and 3: the system text goes into the first user turn; calls have no marks of their own."""

from __future__ import annotations

from agentfly.templates.family import Family
from agentfly.templates.format import ChatFormat

GEMMA = ChatFormat(
    name="gemma",
    begin="<bos>",
    system="{content}\n\n",
    system_in_user=True,
    user="<start_of_turn>user\n{content}<end_of_turn>\n",
    assistant="<start_of_turn>model\n{content}<end_of_turn>\n",
    opening="<start_of_turn>model\n",
    close=("<end_of_turn>",),
    trim=("user", "assistant"),
    tools="You can call these functions:{tools}\n\n"
    'To call one, write a block of JSON:\n```json\n{"name": function name, "parameters": its arguments}\n```',
    call='```json\n{"name": "{name}", "parameters": {arguments}}\n```',
    tool="```tool_output\n{content}\n```\n",
    tool_group="<start_of_turn>user\n{answers}<end_of_turn>\n",
    image="<start_of_image>",
    reader="gemma",
)

FAMILIES = (
    Family.of(GEMMA, needs=("<start_of_turn>", "<end_of_turn>"), aliases=("gemma2", "gemma-2", "gemma3", "gemma-3")),
)
