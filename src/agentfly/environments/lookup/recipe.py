"""The demo: an agent that learns to look up facts. What is the color of the friend of Fotem?

    agentfly demo
    agentfly train lookup algorithm=ppo steps=100
    agentfly train lookup model=Qwen/Qwen2.5-3B-Instruct backend=vllm optimizer.learning_rate=1e-6

The answer cannot be memorized: people and facts are drawn for each task, and the only tool returns one fact per call.
So a task takes two calls, the second about the person that the first one returned, and then the answer. The tiny model
has been pretrained on many uses of the tool, most of them wrong. Rewards alone teach it the right one. Evaluation tasks
are about people who appear in no training task.
"""

from random import Random
from typing import Any

from agentfly import reward
from agentfly.agents import HFAgent
from agentfly.environments.lookup import Lookup
from agentfly.models.lookup import draw
from agentfly.training import TrainConfig


@reward
def exact_answer(prediction: str, answer: str) -> float:
    """1 if the answer is exactly the requested fact, else 0."""
    return float(prediction.strip() == answer)


def agent(**model: Any) -> HFAgent:
    return HFAgent(**model, tools=[Lookup], reward=exact_answer)


def draw_tasks(count: int, seed: int, *, held_out: bool = False) -> list[dict[str, Any]]:
    random = Random(seed)
    return [draw(random, held_out=held_out) for _ in range(count)]


tasks = draw_tasks(2000, seed=1)
eval_tasks = draw_tasks(100, seed=2, held_out=True)
requires = ("train",)
config = TrainConfig(
    model="tiny",
    algorithm="grpo",
    tasks_per_step=16,
    num_chains=8,
    max_turns=4,
    sampling={"max_tokens": 32},
    optimizer={"learning_rate": 5e-4, "schedule": "linear"},
    micro_batch_tokens=4096,
    steps=80,
    evaluation={"every": 10},
    checkpoint={"every": 20},
)
