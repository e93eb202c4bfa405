"""An agent that learns to shop: find the product of a wish, choose its options, buy it.

    agentfly sft recipes/webshop.py --model Qwen/Qwen2.5-3B-Instruct --expert 500 --out warm
    agentfly train recipes/webshop.py model=warm backend=vllm
    AGENTFLY_DATA=… agentfly train recipes/webshop.py model=warm backend=vllm    # on WebShop's own products and goals

Products and wishes are generated, so nothing is downloaded. With AGENTFLY_DATA set they are WebShop's, and its splits
are kept: training on `train`, evaluation on a part of `validation`; the test split is left alone.
"""

import os
from typing import Any

from agentfly.agents import HFAgent
from agentfly.environments.webshop import WebShop, official_tasks
from agentfly.rewards import webshop_reward
from agentfly.training import TrainConfig

SYSTEM = """\
You shop for the user. Search with a few plain words, click a product's number to look at it, click each option that \
the user asked for, and click Buy Now once everything fits. You can buy once."""


def agent(**model: Any) -> HFAgent:
    return HFAgent(**model, tools=[WebShop], reward=webshop_reward, system_prompt=SYSTEM)


def tasks_of(split: str, count: int) -> list[dict[str, Any]]:
    return official_tasks(split)[:count] if os.environ.get("AGENTFLY_DATA") else WebShop.draw_tasks(split, count)


tasks = tasks_of("train", 5000)
eval_tasks = tasks_of("validation", 100)
config = TrainConfig(
    model="Qwen/Qwen2.5-3B-Instruct",
    algorithm="grpo",
    tasks_per_step=16,
    num_chains=8,
    max_turns=15,
    sampling={"max_tokens": 384},
    run_options={"max_chain_tokens": 16384},
    learning_rate=1e-6,
    steps=200,
    eval_every=20,
)
