"""Mathematics with a Python interpreter: the paper's task Code.

    agentfly train benchmarks/paper/code.py model=Qwen/Qwen2.5-3B-Instruct --on verl nodes=1 gpus=8

Data: MATH in `$AGENTFLY_DATA/math` (docs/math.md). The original trained on the 57,000 problems of Open-Reasoner-Zero
and validated on MATH-500: `tasks = read_tasks(FILE)`, from agentfly.data, reads such a file.
"""

from typing import Any

from agentfly.agents import CodeAgent
from agentfly.environments import CodeInterpreter
from agentfly.environments.math import math_tasks
from agentfly.rewards import math_equal_tool
from agentfly.training import TrainConfig

PROMPT = (
    "Solve the problem with Python: write one ```python block per reply and read its output. Then answer in \\boxed{}."
)


def agent(**model: Any) -> CodeAgent:
    return CodeAgent(**model, tools=[CodeInterpreter.run_python], reward=math_equal_tool, system_prompt=PROMPT)


tasks = math_tasks("train")
eval_tasks = math_tasks("test")
config = TrainConfig(
    model="Qwen/Qwen2.5-3B-Instruct",
    algorithm="grpo",
    tasks_per_step=64,
    num_chains=8,
    max_turns=8,
    sampling={"max_tokens": 512},
    kl={"coef": 1e-3, "estimator": "k2"},
    loss={"entropy_coef": 1e-3},
    optimizer={"learning_rate": 5e-7},
    gradient_checkpointing=True,
    steps=150,
    evaluation={"every": 10},
    checkpoint={"every": 10},
)
