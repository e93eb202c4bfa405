"""Rooms: read a number in an image, open that room, read the digit there.

    agentfly train rooms
    agentfly train rooms model=HuggingFaceTB/SmolVLM2-500M-Video-Instruct
    agentfly train rooms model=Qwen/Qwen2.5-VL-3B-Instruct backend=vllm optimizer.learning_rate=1e-6

No text says the number or the digit, and every image is drawn with other colors, places and noise: a model that does
not look at both images is right in one of ten tasks. The tiny model has been taught to read digits and to use the tool
in many ways, most of them wrong. Rewards alone teach it to open the room that it reads.
"""

from typing import Any

from agentfly.agents import HFAgent
from agentfly.environments.recipe_config import small_model_config
from agentfly.environments.rooms import Rooms
from agentfly.rewards import digit_match


def agent(**model: Any) -> HFAgent:
    return HFAgent(**model, tools=[Rooms], reward=digit_match)


tasks = Rooms.draw_tasks("train", 1000)
eval_tasks = Rooms.draw_tasks("validation", 100)
requires = ("train", "vision")
config = small_model_config(
    max_turns=3,
    max_tokens=32,
    model="tiny-vision",
    learning_rate=5e-4,
    steps=50,
    checkpoint={"every": 25},
)
