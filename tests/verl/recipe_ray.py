"""The lookup task with one environment in the whole cluster, which the chains of a group share, and equal rewards.

What happens is appended to the file `seen` beside this one: `reset PROCESS QUESTION` of the environment, and `chain
PROCESS QUESTION` of the worker that scores a chain.
"""

import os
from pathlib import Path
from typing import Any

from agentfly import Pool, reward
from agentfly.agents import HFAgent
from agentfly.environments.lookup import Lookup
from agentfly.tooling import Context
from agentfly.training import TrainConfig
from agentfly.types import Task

SEEN = str(Path(__file__).with_name("seen"))


def record(what: str, task: Task) -> None:
    with open(SEEN, "a") as file:
        file.write(f"{what} {os.getpid()} {task.columns['question']}\n")


class OneLookup(Lookup):
    """A lookup on some node of the cluster; there is one."""

    pool = Pool(runtime="ray", scope="group", max_instances=1)  # type: ignore[arg-type]

    async def reset(self, task: Task) -> None:
        record("reset", task)
        await super().reset(task)


@reward
def equal(prediction: str, context: Context) -> float:
    """0: no group has reward variance, so that no step trains."""
    record("chain", context.task)
    return 0.0


def agent(**model: Any) -> HFAgent:
    return HFAgent(**model, tools=[OneLookup], reward=equal)


tasks = Lookup.draw_tasks("train", 200, seed=1)
config = TrainConfig(
    model="tiny",
    backend={"backend": "transformers", "dtype": "float32"},
    precision="float32",
    tasks_per_step=4,
    num_chains=2,
    max_turns=2,
    sampling={"max_tokens": 32},
    optimizer={"learning_rate": 5e-4, "schedule": "linear"},
    steps=2,
)
