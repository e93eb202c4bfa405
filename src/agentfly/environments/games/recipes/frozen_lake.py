"""FrozenLake: read a grid, walk to the goal, avoid the holes.

    pip install 'agentfly-rl[train]'
    agentfly sft frozen_lake --model new --expert 2000 --steps 600 --learning-rate 1e-3 --out warm
    agentfly train frozen_lake model=warm
    agentfly train frozen_lake model=Qwen/Qwen2.5-3B-Instruct backend=vllm optimizer.learning_rate=1e-6

A fast experiment: thousands of lakes are drawn in seconds, a step takes microseconds, and a model of a million
parameters learns to cross half of them by SFT. GRPO has not raised that so far (docs/lab/environments.md). Start and
goal vary, so no fixed path is always right; evaluation lakes are never trained on.
"""

from typing import Any

from agentfly.agents import HFAgent
from agentfly.environments.games import FrozenLake
from agentfly.environments.recipe_config import small_model_config
from agentfly.rewards import game_won


def agent(**model: Any) -> HFAgent:
    return HFAgent(**model, tools=[FrozenLake], reward=game_won)


tasks = FrozenLake.draw_tasks("train", 4000)
eval_tasks = FrozenLake.draw_tasks("validation", 200)
config = small_model_config(
    max_turns=10,
    max_tokens=32,
    learning_rate=2e-4,
    warmup_steps=2,
    evaluation={"every": 20},
)
