"""Llama 3: the plain chat format written out, with tools in the system turn; from 3.1 on the tokenizer's own template.

The templates from 3.1 on print a date and put the tools into the first user turn, and an answer is a JSON string.
"""

from __future__ import annotations

from agentfly.templates.family import Family
from agentfly.templates.format import ChatFormat

_TOKENS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_CLOSE = ("<|eot_id|>", "<|eom_id|>")

LLAMA_3 = ChatFormat(
    name="llama-3",
    begin="<|begin_of_text|>",
    system="<|start_header_id|>system<|end_header_id|>\n\n{content}<|eot_id|>",
    user="<|start_header_id|>user<|end_header_id|>\n\n{content}<|eot_id|>",
    assistant="<|start_header_id|>assistant<|end_header_id|>\n\n{content}<|eot_id|>",
    opening="<|start_header_id|>assistant<|end_header_id|>\n\n",
    close=_CLOSE,
    trim=("system", "user", "assistant"),
    tools="You can call these functions:{tools}\n\n"
    'To call one, answer with nothing but JSON: {"name": function name, "parameters": its arguments}.',
    call='{"name": "{name}", "parameters": {arguments}}',
    tool="<|start_header_id|>ipython<|end_header_id|>\n\n{content}<|eot_id|>",
    reader="llama-json",
)

FAMILIES = (
    Family.of(LLAMA_3, needs=("<|begin_of_text|>", *_TOKENS), aliases=("llama3",)),
    Family(
        name="llama-3.1",
        needs=_TOKENS,
        close=_CLOSE,
        reader="llama-json",
        image="<|image|>",
        aliases=("llama3.1", "llama-3.2", "llama3.2", "llama-3.3", "llama3.3"),
    ),
)
