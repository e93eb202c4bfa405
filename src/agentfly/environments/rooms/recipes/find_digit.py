"""Find a small digit: see where it is, enlarge that quarter of the image, twice, and read it.

    agentfly train find_digit
    agentfly train find_digit model=HuggingFaceTB/SmolVLM2-500M-Video-Instruct optimizer.learning_rate=1e-5
    agentfly train find_digit model=Qwen/Qwen2.5-VL-3B-Instruct backend=vllm optimizer.learning_rate=1e-6

Harder than `rooms`: two calls in a row have to be right, and each says where in the image something is. In the first
image the digit is about eight pixels high. The tiny model has been taught to read digits, to say in which quarter one
is, and to use the tool in many ways, most of them wrong. Rewards alone teach it to enlarge the quarter that it sees the
digit in.
"""

from typing import Any

from agentfly.agents import HFAgent
from agentfly.environments.recipe_config import small_model_config
from agentfly.environments.rooms import FindDigit
from agentfly.rewards import digit_match


def agent(**model: Any) -> HFAgent:
    return HFAgent(**model, tools=[FindDigit], reward=digit_match)


tasks = FindDigit.draw_tasks("train", 1000)
eval_tasks = FindDigit.draw_tasks("validation", 100)
requires = ("train", "vision")
config = small_model_config(
    max_turns=4,
    max_tokens=32,
    model="tiny-vision-find",
    learning_rate=5e-4,
    steps=50,
    checkpoint={"every": 25},
)
