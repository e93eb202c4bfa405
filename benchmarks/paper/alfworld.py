"""ALFWorld with its official games: the paper's task ALFWorld.

    agentfly train benchmarks/paper/alfworld.py model=Qwen/Qwen2.5-3B-Instruct --on verl nodes=1 gpus=8

Data: the official games in `$AGENTFLY_DATA/alfworld` (docs/alfworld.md). The original ended chains after 10
turns, in which few games can be won.
"""

from typing import Any

from agentfly.agents import ReactAgent
from agentfly.environments.alfworld import ALFWorld, official_tasks
from agentfly.rewards import alfworld_won
from agentfly.training import TrainConfig


def agent(**model: Any) -> ReactAgent:
    return ReactAgent(**model, tools=[ALFWorld], reward=alfworld_won)


tasks = official_tasks("train")
eval_tasks = official_tasks("validation")
config = TrainConfig(
    model="Qwen/Qwen2.5-3B-Instruct",
    algorithm="reinforce_pp",
    tasks_per_step=64,
    num_chains=4,
    max_turns=10,
    sampling={"max_tokens": 512},
    kl={"coef": 1e-2, "estimator": "k2"},
    loss={"entropy_coef": 1e-2},
    optimizer={"learning_rate": 1e-6},
    gradient_checkpointing=True,
    steps=150,
    evaluation={"every": 10},
    checkpoint={"every": 10},
)
