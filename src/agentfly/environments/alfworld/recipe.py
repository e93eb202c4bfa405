"""A household in text: find an object, clean, heat or cool it, and put it where it belongs.

    agentfly train alfworld --warm-start
    agentfly train alfworld model=Qwen/Qwen2.5-3B-Instruct backend=vllm optimizer.learning_rate=1e-6

All six kinds of tasks in all rooms. The commands need a GPU. The games are generated, so nothing is
downloaded. Evaluation games are of a split of their own.

With AGENTFLY_DATA set, the games are the official ones: training on `train` in random order, evaluation during training
on 100 games of `valid_train`, at most 50 turns. `valid_seen` and `valid_unseen` are left for reports:
docs/alfworld.md has the commands.
"""

import os
import random
from typing import Any

from agentfly.agents import HFAgent
from agentfly.environments.alfworld import ALFWorld, official_tasks
from agentfly.environments.recipe_config import pretrained_model_config
from agentfly.rewards import alfworld_won
from agentfly.training import WarmStart


def agent(**model: Any) -> HFAgent:
    return HFAgent(**model, tools=[ALFWorld.alfworld_step], reward=alfworld_won)


if official := bool(os.environ.get("AGENTFLY_DATA")):
    # The files are sorted by kind of task: the first thousand games would be of two kinds.
    tasks = random.Random(0).sample(official_tasks("train"), 3553)
    eval_tasks = random.Random(0).sample(official_tasks("valid_train"), 100)
else:
    tasks = ALFWorld.draw_tasks("train", 2700)
    eval_tasks = ALFWorld.draw_tasks("validation", 240)
requires = ("train",)
warm_start = WarmStart(expert=750, steps=46, learning_rate=1e-4, batch_size=16, model="smollm2-135m", template="chatml")
config = pretrained_model_config(
    max_turns=50 if official else 20,
    max_tokens=48,
    algorithm="gigpo",
    learning_rate=2e-5,
    warmup_steps=10,
    loss={"aggregation": "sequence"},  # failing chains go on to the last turn, and have most of the tokens
    tasks_per_step=24,
    steps=60,
)
