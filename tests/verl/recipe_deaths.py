"""The lookup task with turn rewards, and with processes that are killed for real.

A folder `deaths` beside this file has one file per death, named by the process to kill: `worker`, `server`, `rank`,
`trainer`, `balancer`, or `node` for a node with a rank, other than the head; its text is the number of chains that a
worker scores before. The file is renamed first, so each death happens once.
"""

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import psutil

from agentfly import reward
from agentfly.agents import HFAgent
from agentfly.environments.lookup import Lookup
from agentfly.training import TrainConfig
from agentfly.trajectory import CallStatus

scored = 0
"""Chains that this process has scored."""


def find_processes(title: str) -> list[psutil.Process]:
    """The processes of this cluster that Ray gave a title, in order of creation. The parent of each is its node."""
    raylet = psutil.Process().parent()
    assert raylet is not None
    address = next(argument for argument in raylet.cmdline() if argument.startswith("--gcs-address="))
    actors = []
    for process in psutil.process_iter(["cmdline", "create_time"]):
        parent = process.parent()
        if title in " ".join(process.info["cmdline"] or ()) and parent is not None and address in parent.cmdline():
            actors.append(process)
    return sorted(actors, key=lambda process: process.info["create_time"])


def find_node() -> int:
    """A node with a rank; not the head, without which there is no cluster."""
    nodes = [rank.parent() for rank in find_processes("WorkerDict")]
    return next(node.pid for node in nodes if node is not None and "--head" not in node.cmdline())


VICTIMS = {
    "worker": os.getpid,
    "server": lambda: find_processes("EngineServer")[-1].pid,
    "rank": lambda: find_processes("WorkerDict")[-1].pid,
    "trainer": lambda: find_processes("TrainingJob")[-1].pid,
    "balancer": lambda: find_processes("GlobalRequestLoadBalancer")[-1].pid,
    "node": find_node,
}


@reward
def turn_rewards(prediction: str, answer: str, trajectory: Any) -> list[float]:
    """0.1 for each turn with a valid call, and 1 for the answer."""
    global scored
    scored += 1
    for victim, find in VICTIMS.items():
        order = Path(__file__).with_name("deaths") / victim
        with contextlib.suppress(FileNotFoundError):  # not ordered, or another worker was first
            if scored >= int(order.read_text()):
                order.rename(order.with_suffix(".done"))
                os.kill(find(), signal.SIGKILL)
    valid = [any(call.status is CallStatus.OK for call in turn.calls) for turn in trajectory.turns]
    return [0.1 * score for score in valid[:-1]] + [float(prediction.strip() == answer)]


def agent(**model: Any) -> HFAgent:
    return HFAgent(**model, tools=[Lookup], reward=turn_rewards)


tasks = Lookup.draw_tasks("train", 200, seed=1)
eval_tasks = Lookup.draw_tasks("test", 4, seed=2)
config = TrainConfig(
    model="tiny",
    backend={"backend": "transformers", "dtype": "float32"},
    precision="float32",
    tasks_per_step=4,
    num_chains=4,
    max_turns=4,
    sampling={"max_tokens": 32},
    optimizer={"learning_rate": 5e-4, "schedule": "linear"},
    micro_batch_tokens=64,  # fewer than a chain has
    steps=3,
    checkpoint={"every": 1, "keep": 2},
)
