"""Arithmetic with a Python interpreter, from demonstrations of which more than half are wrong.

    agentfly train math_suboptimal --warm-start
    agentfly eval math_suboptimal --model warm --greedy

The problems are sums, level 1 of `MathWithPython`. In 0.55 of the demonstrations the first operator is a wrong one. SFT
teaches the model to call Python and to copy numbers. Which program to run, it learns from the reward. `--threshold 0`
keeps the wrong demonstrations.
"""

import re
from random import Random
from typing import Any

from agentfly.agents import HFAgent
from agentfly.environments import MathWithPython
from agentfly.environments.recipe_config import small_model_config
from agentfly.rewards import math_equal
from agentfly.training import WarmStart

PROMPT = "Compute with Python, then say the number."
WRONG = 0.55
"""Fraction of the demonstrations with a wrong program."""
MISTAKES = {"**": "*", "*": "+", "+": "-", "-": "+"}
"""The operator that the expert writes by mistake, by the right one."""


def agent(**model: Any) -> HFAgent:
    return HFAgent(**model, tools=[MathWithPython.run_python], reward=math_equal, system_prompt=PROMPT)


def add_mistakes(rows: list[dict[str, Any]], seed: int = 0) -> list[dict[str, Any]]:
    """Replace the first operator of some programs, which the expert runs. The answers stay right."""
    random = Random(seed)
    return [
        {**row, "program": re.sub(r"\*\*|[*+-]", lambda match: MISTAKES[match[0]], row["program"], count=1)}
        if random.random() < WRONG
        else row
        for row in rows
    ]


tasks = add_mistakes(MathWithPython.draw_tasks("train", 3000, levels=[1]))
eval_tasks = MathWithPython.draw_tasks("validation", 200, levels=[1])
requires = ("train", "math")
warm_start = WarmStart(expert=2000, threshold=0, steps=600, learning_rate=1e-3, batch_size=16)
config = small_model_config(
    max_turns=3,
    max_tokens=64,
    learning_rate=2e-4,
    warmup_steps=2,
    steps=30,
    evaluation={"every": 15},
)
