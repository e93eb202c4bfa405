"""Tiles: find a tile by its color, click on it, read the digit under it.

    pip install 'agentfly-rl[train,vision]'
    agentfly train tiles model=HuggingFaceTB/SmolVLM2-500M-Video-Instruct
    agentfly train tiles model=Qwen/Qwen2.5-VL-3B-Instruct backend=vllm optimizer.learning_rate=1e-6

Harder than `rooms`: the color in the question must be found among nine tiles, and its place written as row and column.
`Tiles.draw_tasks(size=2)` has four tiles. Nothing but the images says where a color or which digit is.
"""

from typing import Any

from agentfly.agents import HFAgent
from agentfly.environments.rooms import Tiles
from agentfly.rewards import digit_match
from agentfly.training import TrainConfig


def agent(**model: Any) -> HFAgent:
    return HFAgent(**model, tools=[Tiles], reward=digit_match)


tasks = Tiles.draw_tasks("train", 500)
eval_tasks = Tiles.draw_tasks("validation", 100)
config = TrainConfig(
    model="HuggingFaceTB/SmolVLM2-500M-Video-Instruct",
    algorithm="grpo",
    tasks_per_step=16,
    num_chains=8,
    max_turns=3,
    sampling={"max_tokens": 32},
    optimizer={"learning_rate": 5e-4, "schedule": "linear"},
    micro_batch_tokens=4096,
    steps=50,
    evaluation={"every": 10},
    checkpoint={"every": 25},
)
