"""Families with the tokenizer's own template, whose turns end in a way that a rendering does not show.

Gemma 4 and Apertus end a turn with calls by the token that opens the results. Kimi K3 closes nested elements before the
end of a message. The first templates of LFM2 show tools and results, but write no calls.
"""

from __future__ import annotations

from agentfly.templates.chatml import CHATML_TOKENS
from agentfly.templates.family import Family

FAMILIES = (
    Family(
        name="lfm2",
        needs=CHATML_TOKENS,
        tokens=("<|tool_call_start|>", "<|tool_call_end|>"),
        close=("<|im_end|>",),
        reader="lfm2",
        writes_calls=False,
        aliases=("lfm2.5", "lfm2-vl"),
    ),
    Family(
        name="gemma-4",
        needs=("<|turn>", "<turn|>", "<|tool_response>"),
        close=("<turn|>", "<|tool_response>"),
        reader="gemma-4",
        aliases=("gemma4",),
    ),
    Family(
        name="apertus",
        needs=("<|assistant_start|>", "<|assistant_end|>", "<|tools_suffix|>"),
        close=("<|assistant_end|>", "<|tools_suffix|>"),
        reader="apertus",
    ),
    Family(
        name="kimi-k3",
        needs=("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"),
        close=("<|end_of_msg|>",),
        reader="kimi-k3",
    ),
)
