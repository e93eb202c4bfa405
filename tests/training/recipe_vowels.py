"""A recipe for tests: an untrained model learns to write many vowels, over two turns.

Cheap, and rewarded from the first chain on: what it says first is answered, then it says something again.
"""

import itertools
import os
import signal
import time
from typing import Any

from agentfly import reward
from agentfly.agents import HFAgent
from agentfly.training import TrainConfig

scored = itertools.count(1)


@reward
def vowels(trajectory: Any) -> float:
    """The share of vowels in everything the model said."""
    if os.environ.get("VOWELS_STOP") == str(next(scored)):  # the process that started this one ends in this rollout
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(60)
    reply = "".join(message.text for message in trajectory.messages if message.role == "assistant")
    return sum(letter in "aeiou" for letter in reply) / max(len(reply), 12)


def agent(**model: Any) -> HFAgent:
    time.sleep(float(os.environ.get("VOWELS_PAUSE", "0")))
    return HFAgent(**model, reward=vowels, on_no_call={"then": "continue", "nudge": "go on", "limit": 3})


tasks = [f"say something about {number}" for number in range(40)]
eval_tasks = [f"say something about {number}" for number in range(40, 48)]
config = TrainConfig(
    model=os.environ.get("VOWELS_MODEL", "tiny"),
    backend={"backend": "transformers", "dtype": "float32", "kv_memory": 1 << 24},
    tasks_per_step=3,
    num_chains=4,
    max_turns=2,
    sampling={"max_tokens": 8},
    optimizer={"learning_rate": 2e-2},
    steps=6,
    evaluation={"every": 2},
    checkpoint={"every": 1},
)
