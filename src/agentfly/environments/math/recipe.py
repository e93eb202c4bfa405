r"""Arithmetic with a Python interpreter: what is 461 * 996 + 650?

    pip install 'agentfly-rl[train,math]'
    agentfly sft math_with_python --model new --expert 2000 \
        --steps 1000 --batch-size 16 --learning-rate 1e-3 --out warm
    agentfly train math_with_python model=warm
    agentfly eval math_with_python --model warm
    agentfly train math_with_python model=Qwen/Qwen2.5-3B-Instruct backend=vllm optimizer.learning_rate=1e-6

The numbers are drawn from a seed, and no problem is in two splits. Level 1, sums in digits and in words, is for a small
model; levels 2 and 3 are word problems of several steps and problems that take a loop.
"""

from typing import Any

from agentfly.agents import HFAgent
from agentfly.environments import MathWithPython
from agentfly.environments.recipe_config import small_model_config
from agentfly.rewards import math_equal

PROMPT = "Compute with Python, then say the number."


def agent(**model: Any) -> HFAgent:
    return HFAgent(**model, tools=[MathWithPython.run_python], reward=math_equal, system_prompt=PROMPT)


tasks = MathWithPython.draw_tasks("train", 2000, levels=[1])
eval_tasks = MathWithPython.draw_tasks("validation", 100, levels=[1])
config = small_model_config(max_turns=3, max_tokens=64)
