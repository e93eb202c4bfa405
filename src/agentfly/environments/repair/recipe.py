"""Repository repair: find and fix the faulty line of a small Python package.

    pip install 'agentfly-rl[train]'
    agentfly train repair model=Qwen/Qwen2.5-Coder-3B-Instruct backend=vllm
    agentfly eval repair --model Qwen/Qwen2.5-Coder-3B-Instruct --by kind

Every task is a package of about a hundred lines with one faulty line. The hidden tests are never in the agent's
sandbox, so it cannot pass them by changing them. A line that is faulty in an evaluation task is never faulty in a
training task; `draw_tasks(packages=[…])` holds out whole packages.

It is for a pretrained model of code, with which it has not been measured. SmolLM2-135M does not learn it: after SFT it
repairs a fifth of the packages that it was shown, and none of 200 held-out ones (docs/lab/recipes.md).
"""

from typing import Any

from agentfly.agents import HFAgent
from agentfly.environments.repair import Repair
from agentfly.rewards import repair_success
from agentfly.training import TrainConfig

PROMPT = "Find the line that is wrong, change it with edit_file, and run the tests."
TOOLS = [Repair.read_file, Repair.search_files, Repair.edit_file, Repair.undo_edit, Repair.run_shell]


def agent(**model: Any) -> HFAgent:
    return HFAgent(**model, tools=TOOLS, reward=repair_success, system_prompt=PROMPT)


tasks = Repair.draw_tasks("train", 300)
eval_tasks = Repair.draw_tasks("validation", 50)
config = TrainConfig(
    tasks_per_step=16, sampling={"max_tokens": 256}, evaluation={"every": 20}, checkpoint={"every": 20}
)
