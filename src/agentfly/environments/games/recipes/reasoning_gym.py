"""Questions of reasoning-gym: arithmetic, sequences, words spelled backward.

    pip install 'agentfly-rl[train,reasoning-gym]'
    agentfly sft reasoning_gym --model new --expert 2000 --steps 600 --learning-rate 1e-3 --out warm
    agentfly train reasoning_gym model=warm
    agentfly train reasoning_gym model=Qwen/Qwen2.5-3B-Instruct backend=vllm optimizer.learning_rate=1e-6
    agentfly eval reasoning_gym --model warm --by dataset

One call, `answer`, ends the chain, and the dataset's own scorer computes the reward. Name any of the hundred
generators in `datasets`.
"""

from typing import Any

from agentfly.agents import HFAgent
from agentfly.environments.games import ReasoningGym
from agentfly.environments.recipe_config import small_model_config
from agentfly.rewards import reasoning_gym_score


def agent(**model: Any) -> HFAgent:
    return HFAgent(**model, tools=[ReasoningGym], reward=reasoning_gym_score)


tasks = ReasoningGym.draw_tasks("train", 2000)
eval_tasks = ReasoningGym.draw_tasks("validation", 100)
config = small_model_config(max_turns=1, max_tokens=256)
