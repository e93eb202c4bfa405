"""ScienceWorld: elementary science, such as finding an animal and putting it into the red box.

    pip install 'agentfly-rl[train,scienceworld]'
    agentfly sft scienceworld --model new --expert 400 --steps 800 --learning-rate 1e-3 --out warm
    agentfly train scienceworld model=warm
    agentfly eval scienceworld --model warm --by task_name
    agentfly train scienceworld model=Qwen/Qwen2.5-3B-Instruct backend=vllm optimizer.learning_rate=1e-6

Needs Java too. These are seven short ones of the thirty tasks; leave `tasks=` out for all of them, and give the long
ones more turns. Variations are those of the official splits.
"""

from typing import Any

from agentfly.agents import HFAgent
from agentfly.environments import ScienceWorld
from agentfly.rewards import scienceworld_score
from agentfly.training import TrainConfig

SHORT = (
    *("lifespan-longest-lived", "lifespan-shortest-lived", "lifespan-longest-lived-then-shortest-lived"),
    *("find-living-thing", "find-non-living-thing", "find-plant", "find-animal"),
)


def agent(**model: Any) -> HFAgent:
    return HFAgent(**model, tools=[ScienceWorld.scienceworld_step], reward=scienceworld_score)


tasks = ScienceWorld.draw_tasks("train", 400, tasks=SHORT)
eval_tasks = ScienceWorld.draw_tasks("validation", 42, tasks=SHORT)
config = TrainConfig(
    tasks_per_step=16,
    max_turns=25,
    sampling={"max_tokens": 64},
    optimizer={"learning_rate": 3e-4},
    evaluation={"every": 20},
    checkpoint={"every": 20},
)
