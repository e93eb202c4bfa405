"""Train an agent that works in a shell on tasks such as: how many .log files are there below docs?

    agentfly train recipes/shell.py model=Qwen/Qwen2.5-3B-Instruct backend=vllm
    agentfly sft recipes/shell.py --model new --expert 1000 --steps 1000 --learning-rate 1e-3 --out warm
    agentfly train recipes/shell.py model=warm optimizer.learning_rate=3e-4

Every task has its own file tree in a sandbox. The reward compares the resulting files and the output with those of the
gold command on a copy of the tree: any command with the same effect is correct.
"""

from typing import Any

from agentfly.agents import HFAgent
from agentfly.environments.shell import Shell
from agentfly.rewards import shell_match
from agentfly.training import TrainConfig


def agent(**model: Any) -> HFAgent:
    return HFAgent(**model, tools=[Shell], reward=shell_match)


tasks = Shell.draw_tasks("train", 2000)
eval_tasks = Shell.draw_tasks("validation", 88)
config = TrainConfig(
    model="tiny",
    algorithm="grpo",
    tasks_per_step=8,
    num_chains=8,
    max_turns=4,
    sampling={"max_tokens": 96},
    optimizer={"learning_rate": 1e-6},
    steps=100,
    evaluation={"every": 20},
    checkpoint={"every": 20},
)
