"""Qwen 2.5, written out; Qwen 3, whose template decides by what follows a turn whether to show its thinking."""

from __future__ import annotations

from dataclasses import replace

from agentfly.templates.chatml import CHATML, CHATML_TOKENS
from agentfly.templates.family import Family

_PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"

QWEN2_5 = replace(
    CHATML,
    name="qwen2.5",
    default_system="You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
    image=_PICTURE,
)

FAMILIES = (
    Family.of(QWEN2_5, needs=CHATML_TOKENS, aliases=("qwen2.5-vl", "qwen2.5-instruct", "qwen-2.5")),
    Family(
        name="qwen3",
        needs=(*CHATML_TOKENS, "<think>"),
        close=("<|im_end|>",),
        reader="hermes",
        image=_PICTURE,
        aliases=("qwen-3", "qwen3-instruct", "qwen3-coder", "qwen3-vl", "qwq"),
    ),
)
