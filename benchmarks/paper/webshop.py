"""WebShop with its 1,000 products: the paper's task WebShop.

    agentfly train benchmarks/paper/webshop.py model=Qwen/Qwen2.5-3B-Instruct --on verl nodes=1 gpus=8

Data: WebShop's files in `$AGENTFLY_DATA/webshop` (docs/webshop.md).
"""

from typing import Any

from agentfly.agents import ReactAgent
from agentfly.environments.webshop import WebShop, official_tasks
from agentfly.rewards import webshop_reward
from agentfly.training import TrainConfig


def agent(**model: Any) -> ReactAgent:
    return ReactAgent(**model, tools=[WebShop], reward=webshop_reward)


tasks = official_tasks("train")
eval_tasks = official_tasks("validation")[:200]
config = TrainConfig(
    model="Qwen/Qwen2.5-3B-Instruct",
    algorithm="grpo",
    tasks_per_step=128,
    num_chains=4,
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
