"""gpt-oss: a turn is several messages on channels; `<|end|>` ends a message, `<|return|>` and `<|call|>` the turn."""

from __future__ import annotations

from agentfly.templates.family import Family

FAMILIES = (
    Family(
        name="gpt-oss",
        needs=("<|channel|>", "<|message|>", "<|start|>"),
        close=("<|return|>", "<|call|>", "<|end|>"),
        stop=("<|return|>", "<|call|>"),
        reader="harmony",
        aliases=("gptoss", "harmony"),
    ),
)
