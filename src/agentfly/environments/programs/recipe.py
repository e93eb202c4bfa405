"""Program synthesis: write a function, test it in an interpreter, be judged by hidden tests.

    agentfly eval program_synthesis --model warm --greedy
    agentfly train program_synthesis --warm-start
    agentfly train program_synthesis model=Qwen/Qwen2.5-3B-Instruct backend=vllm optimizer.learning_rate=1e-6

Functions over lists are composed of parts, and no function is in two splits: a model that has learned the parts can
write the held-out functions. The commands need a GPU. For a larger model, take all kinds, or `mbpp_tasks`.
"""

from typing import Any

from agentfly.agents import HFAgent
from agentfly.environments import ProgramSynthesis
from agentfly.environments.recipe_config import pretrained_model_config
from agentfly.rewards import unit_tests
from agentfly.training import WarmStart

PROMPT = "Try the function with Python, then give it as the answer."


def agent(**model: Any) -> HFAgent:
    return HFAgent(
        **model, tools=[ProgramSynthesis.run_python], reward=unit_tests, system_prompt=PROMPT, on_invalid_call="end"
    )


tasks = ProgramSynthesis.draw_tasks("train", 2000, kinds=["lists"])
eval_tasks = ProgramSynthesis.draw_tasks("validation", 200, kinds=["lists"])
requires = ("train",)
warm_start = WarmStart(expert=300, steps=13, learning_rate=1e-4, batch_size=16, model="smollm2-135m", template="chatml")
config = pretrained_model_config(max_turns=3, max_tokens=128)
