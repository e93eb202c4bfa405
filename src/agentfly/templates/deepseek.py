"""DeepSeek V3 and R1."""

from __future__ import annotations

from agentfly.templates.family import Family

_FORGETS = "from its second round on the template forgets <｜tool▁calls▁begin｜> and <｜tool▁outputs▁begin｜>"

FAMILIES = (
    Family(
        name="deepseek",
        needs=("<｜User｜>", "<｜Assistant｜>"),
        close=("<｜end▁of▁sentence｜>",),
        reader="deepseek",
        corrected=dict.fromkeys(("tool", "tools", "tool, user", "tools, user"), _FORGETS),
        aliases=("deepseek-v3", "deepseek-r1", "deepseek-v3.1"),
    ),
)
