"""ScienceWorld, all thirty tasks: the paper's task ScienceWorld.

    agentfly train benchmarks/paper/scienceworld.py model=Qwen/Qwen2.5-3B-Instruct --on verl nodes=1 gpus=8

Data: in the package `scienceworld`, which needs Java (docs/scienceworld.md).
"""

from typing import Any

from agentfly.agents import ReactAgent
from agentfly.environments import ScienceWorld
from agentfly.rewards import scienceworld_score
from agentfly.training import TrainConfig


def agent(**model: Any) -> ReactAgent:
    return ReactAgent(**model, tools=[ScienceWorld.scienceworld_step], reward=scienceworld_score)


tasks = ScienceWorld.draw_tasks("train", 3000)
eval_tasks = ScienceWorld.draw_tasks("validation", 200)
config = TrainConfig(
    model="Qwen/Qwen2.5-3B-Instruct",
    algorithm="reinforce_pp",
    tasks_per_step=128,
    num_chains=1,
    max_turns=20,
    sampling={"max_tokens": 512},
    kl={"coef": 1e-3, "estimator": "k2"},
    loss={"entropy_coef": 1e-3},
    optimizer={"learning_rate": 4e-7},
    gradient_checkpointing=True,
    steps=200,
    evaluation={"every": 10},
    checkpoint={"every": 10},
)
