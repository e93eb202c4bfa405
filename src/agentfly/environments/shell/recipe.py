"""Shell tasks in a file tree: how many .log files are there below docs?

    agentfly eval shell --model warm --by kind
    agentfly train shell --warm-start
    agentfly train shell model=Qwen/Qwen2.5-3B-Instruct backend=vllm optimizer.learning_rate=1e-6

Every task has its own file tree, in a sandbox. Commands are judged by the files and output they produce, compared with
those of the reference command on a copy of the tree, so any correct solution counts. The commands need a GPU.
"""

from typing import Any

from agentfly.agents import HFAgent
from agentfly.environments.recipe_config import pretrained_model_config
from agentfly.environments.shell import Shell
from agentfly.rewards import shell_match
from agentfly.training import WarmStart


def agent(**model: Any) -> HFAgent:
    return HFAgent(**model, tools=[Shell], reward=shell_match)


tasks = Shell.draw_tasks("train", 2000)
eval_tasks = Shell.draw_tasks("validation", 200)
requires = ("train",)
warm_start = WarmStart(expert=200, steps=9, learning_rate=1e-4, batch_size=16, model="smollm2-135m", template="chatml")
config = pretrained_model_config(max_turns=3, max_tokens=96)
