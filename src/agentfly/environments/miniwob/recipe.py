"""MiniWoB++: use small web pages in a real browser, by screenshots, mouse and keyboard.

    apt-get install chromium
    pip install 'agentfly-rl[train,vision,gui]'
    agentfly train miniwob model=Qwen/Qwen2.5-VL-3B-Instruct backend=vllm
    agentfly eval miniwob --model Qwen/Qwen2.5-VL-3B-Instruct --by task

Every chain has a browser of its own in a worker process. The pages and rewards are MiniWoB++'s; nothing is loaded from
the network. These commands need a pretrained vision model and have not been measured.
"""

from typing import Any

from agentfly.agents import VisionAgent
from agentfly.environments.miniwob import MiniWoB
from agentfly.rewards import miniwob_reward
from agentfly.training import TrainConfig


def agent(**model: Any) -> VisionAgent:
    return VisionAgent(**model, tools=[MiniWoB], reward=miniwob_reward)


tasks = MiniWoB.draw_tasks("train", 2000)
eval_tasks = MiniWoB.draw_tasks("validation", 96)
config = TrainConfig(
    model="Qwen/Qwen2.5-VL-3B-Instruct",
    max_turns=12,
    sampling={"max_tokens": 128},
    evaluation={"every": 10},
    checkpoint={"every": 20},
)
