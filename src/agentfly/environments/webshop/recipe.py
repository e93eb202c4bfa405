"""WebShop: find the product that an instruction asks for, choose its options, buy it.

    agentfly train webshop --warm-start
    agentfly train webshop model=Qwen/Qwen2.5-3B-Instruct backend=vllm optimizer.learning_rate=1e-6

The commands need a GPU. Products and goals are generated, so nothing is downloaded. With AGENTFLY_DATA set
they are WebShop's, with its splits: training on `train`, evaluation on a part of `validation`. The test split is not
used.
"""

import os
from typing import Any

from agentfly.agents import HFAgent
from agentfly.environments.recipe_config import pretrained_model_config
from agentfly.environments.webshop import WebShop, official_tasks
from agentfly.rewards import webshop_reward
from agentfly.scoring import RewardLike
from agentfly.training import WarmStart

PROMPT = "Search, click a product's number, click each option that is wanted, then click Buy Now."


class BriefWebShop(WebShop):
    """A shop with short pages, whose expert sees no more than the model: a small model can imitate it."""

    view = "brief"
    window = 3
    expert_explores = True


def agent(reward: RewardLike = webshop_reward, **model: Any) -> HFAgent:
    return HFAgent(**model, tools=[BriefWebShop], reward=reward, system_prompt=PROMPT)


def parse_tasks(split: str, count: int) -> list[dict[str, Any]]:
    return official_tasks(split)[:count] if os.environ.get("AGENTFLY_DATA") else WebShop.draw_tasks(split, count)


tasks = parse_tasks("train", 4000)
eval_tasks = parse_tasks("validation", 200)
requires = ("train", "webshop")
warm_start = WarmStart(expert=300, steps=10, learning_rate=1e-4, batch_size=16, model="smollm2-135m", template="chatml")
config = pretrained_model_config(max_turns=8, max_tokens=64)
