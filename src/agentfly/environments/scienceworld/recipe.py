"""ScienceWorld: elementary science, such as finding the animal with the longest life span.

    agentfly train scienceworld --warm-start
    agentfly eval scienceworld --model warm --greedy --by task_name
    agentfly train scienceworld model=Qwen/Qwen2.5-3B-Instruct backend=vllm optimizer.learning_rate=1e-6

Needs Java too. These are three of the thirty tasks, with 58 variations each to train on, three times with different
demonstrations. Held out are all 188 variations of the official splits validation and test, and 12 of train.

The simulator's own solutions presuppose the room in which a task starts and the animals that are there, which the model
has not seen. The expert of this recipe has seen no more than the model: it teleports, and names animals in random
order. Naming one that is not there has no effect. Only solved tasks are demonstrated. The reward is 1 for a solved
task, else 0.
"""

from random import Random
from typing import Any

from agentfly.agents import HFAgent
from agentfly.environments import ScienceWorld
from agentfly.environments.recipe_config import small_model_config
from agentfly.rewards import gate, scienceworld_score
from agentfly.training import WarmStart
from agentfly.types import Task, ToolCall

LIFESPAN = ("lifespan-longest-lived", "lifespan-shortest-lived", "lifespan-longest-lived-then-shortest-lived")
ANIMALS = (
    *("ant", "beaver", "brown bear", "chameleon", "chipmunk", "crocodile", "dragonfly", "elephant", "frog"),
    *("giant tortoise", "hedgehog", "mouse", "parrot", "rabbit", "wolf"),
)
"""The animals of the training variations of the tasks on life span. Three of them are there in each."""


class RandomSearch(ScienceWorld):
    """ScienceWorld with an expert that names animals in random order. In other tasks it is the usual one."""

    async def reset(self, task: Task) -> None:
        await super().reset(task)
        animals = Random(task.id).sample(ANIMALS, len(ANIMALS))
        actions = ["teleport to outside", *(f"focus on {animal}" for animal in animals)]
        self._plan = iter(actions) if task.columns["task_name"] in LIFESPAN else None

    async def expert(self) -> ToolCall | str:
        if self._plan is None:
            return await super().expert()
        action = None if self.ended else next(self._plan, None)
        return "Done." if action is None else ToolCall("scienceworld_step", {"action": action})


def agent(**model: Any) -> HFAgent:
    solved = gate(scienceworld_score, scienceworld_score, name="solved")
    return HFAgent(**model, tools=[RandomSearch.scienceworld_step], reward=solved)


variations = ScienceWorld.draw_tasks("train", 186, tasks=LIFESPAN)
tasks = [
    {**row, "id": f"{row['id']} {order}"}  # the expert's order depends on the id
    for order in range(3)
    for row in variations[:174]
]
eval_tasks = [
    *variations[174:],
    *ScienceWorld.draw_tasks("validation", 93, tasks=LIFESPAN),
    *ScienceWorld.draw_tasks("test", 95, tasks=LIFESPAN),
]
requires = ("train", "scienceworld")
warm_start = WarmStart(expert=522, steps=300, learning_rate=1e-3, batch_size=16)
config = small_model_config(
    max_turns=10,
    max_tokens=48,
    loss={"aggregation": "sequence"},  # chains that fail have most of the tokens
    learning_rate=2e-4,
    warmup_steps=2,
    run_options={"max_concurrent_chains": 64},  # four Java processes
    tasks_per_step=32,
    steps=30,
    evaluation={},  # before and after training: 400 chains each
)
