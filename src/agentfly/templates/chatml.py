"""ChatML: the format of Qwen's, Hugging Face's and many others' models. Calls are Hermes JSON."""

from __future__ import annotations

from dataclasses import replace

from agentfly.templates.family import Family
from agentfly.templates.format import ChatFormat

HERMES_TOOLS = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>{tools}\n</tools>\n\n"
    "For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML "
    'tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)

CHATML = ChatFormat(
    name="chatml",
    system="<|im_start|>system\n{content}<|im_end|>\n",
    user="<|im_start|>user\n{content}<|im_end|>\n",
    assistant="<|im_start|>assistant\n{content}<|im_end|>\n",
    opening="<|im_start|>assistant\n",
    close=("<|im_end|>",),
    tools=HERMES_TOOLS,
    call='<tool_call>\n{"name": "{name}", "arguments": {arguments}}\n</tool_call>',
    tool="\n<tool_response>\n{content}\n</tool_response>",
    tool_group="<|im_start|>user{answers}<|im_end|>\n",
    reader="hermes",
)
SMOLLM2 = replace(
    CHATML,
    name="smollm2",
    default_system="You are a helpful AI assistant named SmolLM, trained by Hugging Face",
)
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")

FAMILIES = (
    Family.of(SMOLLM2, needs=CHATML_TOKENS, aliases=("smollm", "smollm2-instruct")),
    Family.of(CHATML, needs=CHATML_TOKENS, aliases=("hermes", "hermes-2")),
)
