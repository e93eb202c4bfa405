"""An agent that learns to look things up: what is the colour of the friend of Fotem?

    agentfly train recipes/lookup.py
    agentfly train recipes/lookup.py algorithm=ppo steps=100
    agentfly train recipes/lookup.py model=Qwen/Qwen2.5-3B-Instruct backend=vllm optimizer.learning_rate=1e-6

Nobody can know the answer: people and facts are drawn anew for each task, and the one tool tells one fact at a time. So
it takes two calls, the second about whom the first one named, and then the answer. The tiny model has seen the tool
used in many ways, most of them wrong; rewards alone teach it the right one. Held-out tasks are about people whom it
has never read of.
"""

from random import Random
from typing import Any

from agentfly import reward
from agentfly.agents import HFAgent
from agentfly.environments.lookup import Lookup
from agentfly.models.lookup import draw
from agentfly.training import TrainConfig


@reward
def answered(prediction: str, answer: str) -> float:
    """One if the answer is the fact that was asked for, and nothing else."""
    return float(prediction.strip() == answer)


def agent(**model: Any) -> HFAgent:
    return HFAgent(**model, tools=[Lookup], reward=answered)


def draw_tasks(count: int, seed: int, *, held_out: bool = False) -> list[dict[str, Any]]:
    random = Random(seed)
    return [draw(random, held_out=held_out) for _ in range(count)]


tasks = draw_tasks(2000, seed=1)
eval_tasks = draw_tasks(100, seed=2, held_out=True)
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
