"""WebShop in screenshots: find the product that an instruction asks for, choose its options, buy it.

    apt-get install chromium
    pip install 'agentfly-rl[train,webshop,vision]'
    agentfly train visual_webshop model=Qwen/Qwen2.5-VL-3B-Instruct backend=vllm

Every page is rendered by a browser and shown as a screenshot; elements are clicked by position or by label. The last
command needs a pretrained vision model and has not been measured.
"""

from typing import Any

from agentfly.agents import VisionAgent
from agentfly.environments.webshop import VisualWebShop
from agentfly.rewards import webshop_reward
from agentfly.training import TrainConfig

PROMPT = "Search, click on a product's number, click on each option that is wanted, then click on Buy Now."


def agent(**model: Any) -> VisionAgent:
    return VisionAgent(**model, tools=[VisualWebShop], reward=webshop_reward, system_prompt=PROMPT)


tasks = VisualWebShop.draw_tasks("train", 2000)
eval_tasks = VisualWebShop.draw_tasks("validation", 64)
config = TrainConfig(
    model="Qwen/Qwen2.5-VL-3B-Instruct",
    tasks_per_step=4,
    num_chains=4,
    sampling={"max_tokens": 128},
    evaluation={"every": 10},
    checkpoint={"every": 20},
)
