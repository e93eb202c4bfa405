"""A household in text: find an object, clean, heat or cool it, and put it where it belongs.

    pip install 'agentfly-rl[train]'
    agentfly sft alfworld --model new --expert 4000 --steps 3200 \
        --learning-rate 1e-3 --prompt-loss-weight 0.1 --out warm
    agentfly train alfworld model=warm
    agentfly train alfworld model=Qwen/Qwen2.5-3B-Instruct backend=vllm algorithm=gigpo \
        optimizer.learning_rate=1e-6

The games are generated, so nothing is downloaded; evaluation games are of a split of their own. With the official games
in AGENTFLY_DATA, `agentfly eval` on a file of `official_tasks("validation")` gives figures comparable with the
literature.
"""

from typing import Any

from agentfly.agents import HFAgent
from agentfly.environments.alfworld import ALFWorld
from agentfly.environments.recipe_config import small_model_config
from agentfly.rewards import alfworld_won


def agent(**model: Any) -> HFAgent:
    return HFAgent(**model, tools=[ALFWorld.alfworld_step], reward=alfworld_won)


# None takes all kinds and all rooms; one of each is enough for a tiny model.
KINDS, ROOMS = ["pick_and_place_simple"], ["bathroom"]

tasks = ALFWorld.draw_tasks("train", 4000, kinds=KINDS, rooms=ROOMS)
eval_tasks = ALFWorld.draw_tasks("validation", 100, kinds=KINDS, rooms=ROOMS)
config = small_model_config(max_turns=20, max_tokens=48)
