"""An agent that keeps house: find a thing, clean, heat or cool it, put it where it belongs.

    agentfly sft recipes/alfworld.py --model new --expert 800 --steps 400 --learning-rate 2e-3 --out warm
    agentfly train recipes/alfworld.py model=warm
    agentfly train recipes/alfworld.py model=Qwen/Qwen2.5-3B-Instruct backend=vllm learning_rate=1e-6 algorithm=gigpo

Games are generated, so nothing has to be downloaded; held-out ones are of a split of their own. With the official games
in AGENTFLY_DATA, `agentfly eval` on a file of `official_tasks("validation")` gives figures that compare with others'.
"""

from typing import Any

from agentfly.agents import HFAgent
from agentfly.environments.alfworld import ALFWorld
from agentfly.rewards import alfworld_won
from agentfly.training import TrainConfig


def agent(**model: Any) -> HFAgent:
    return HFAgent(**model, tools=[ALFWorld.alfworld_step], reward=alfworld_won)


tasks = ALFWorld.draw_tasks("train", 1200)
eval_tasks = ALFWorld.draw_tasks("validation", 60)
config = TrainConfig(
    model="warm",
    algorithm="grpo",
    tasks_per_step=16,
    num_chains=8,
    max_turns=30,
    sampling={"max_tokens": 128},
    learning_rate=3e-4,
    schedule="linear",
    micro_batch_tokens=4096,
    steps=40,
    eval_every=10,
    save_every=20,
)
