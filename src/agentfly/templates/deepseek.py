"""DeepSeek V3 and R1."""

from __future__ import annotations

from agentfly.templates.family import Family

FAMILIES = (
    Family(
        name="deepseek",
        needs=("<｜User｜>", "<｜Assistant｜>"),
        close=("<｜end▁of▁sentence｜>",),
        reader="deepseek",
        corrected={
            kind: "from its second round on the template forgets <｜tool▁calls▁begin｜> and <｜tool▁outputs▁begin｜>"
            for kind in ("tool", "tools")
        },
        aliases=("deepseek-v3", "deepseek-r1", "deepseek-v3.1"),
    ),
)
