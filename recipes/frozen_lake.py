"""An agent that crosses a frozen lake: read the grid, walk to the goal, step into no hole.

    agentfly sft recipes/frozen_lake.py --model new --expert 2000 --steps 600 --learning-rate 1e-3 --out warm
    agentfly train recipes/frozen_lake.py model=warm
    agentfly train recipes/frozen_lake.py model=Qwen/Qwen2.5-3B-Instruct backend=vllm optimizer.learning_rate=1e-6

A quick study: lakes are drawn by the thousand, a step costs microseconds, and a model of a million parameters can learn
it. Start and goal may be anywhere, so there is no way that is always right; held-out lakes were never seen.
"""

from typing import Any

from agentfly.agents import HFAgent
from agentfly.environments.games import FrozenLake
from agentfly.rewards import game_won
from agentfly.training import TrainConfig


def agent(**model: Any) -> HFAgent:
    return HFAgent(**model, tools=[FrozenLake], reward=game_won)


tasks = FrozenLake.draw_tasks("train", 4000)
eval_tasks = FrozenLake.draw_tasks("validation", 100)
config = TrainConfig(
    model="tiny",
    algorithm="grpo",
    tasks_per_step=16,
    num_chains=8,
    max_turns=10,
    sampling={"max_tokens": 32},
    optimizer={"learning_rate": 3e-4, "schedule": "linear"},
    micro_batch_tokens=4096,
    steps=40,
    evaluation={"every": 10},
    checkpoint={"every": 20},
)
