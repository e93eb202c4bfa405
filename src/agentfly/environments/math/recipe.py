"""Arithmetic with a Python interpreter: what is 461 * 996 + 650?

    agentfly eval math_with_python --model warm --by level
    agentfly train math_with_python --warm-start
    agentfly train math_with_python model=Qwen/Qwen2.5-3B-Instruct backend=vllm optimizer.learning_rate=1e-6

The numbers are drawn from a seed, and no problem is in two splits. Level 1 has sums in digits and in words. Levels 2
and 3 are word problems of several steps and problems that take a loop. The commands need a GPU. The recipe
`math_suboptimal` trains a model of a million parameters on a CPU.
"""

from typing import Any

from agentfly.agents import HFAgent
from agentfly.environments import MathWithPython
from agentfly.environments.recipe_config import pretrained_model_config
from agentfly.rewards import math_equal
from agentfly.training import WarmStart

PROMPT = "Compute with Python, then say the number."


def agent(**model: Any) -> HFAgent:
    return HFAgent(**model, tools=[MathWithPython.run_python], reward=math_equal, system_prompt=PROMPT)


tasks = MathWithPython.draw_tasks("train", 4000)
eval_tasks = MathWithPython.draw_tasks("validation", 200)
requires = ("train", "math")
warm_start = WarmStart(expert=200, steps=9, learning_rate=1e-4, batch_size=16, model="smollm2-135m", template="chatml")
config = pretrained_model_config(max_turns=3, max_tokens=96, zero_variance="resample", steps=25)
