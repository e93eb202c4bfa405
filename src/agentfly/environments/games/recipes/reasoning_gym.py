"""Questions of reasoning-gym: how many sisters does Alice's brother have?

    agentfly train reasoning_gym --warm-start
    agentfly train reasoning_gym model=Qwen/Qwen2.5-3B-Instruct backend=vllm optimizer.learning_rate=1e-6
    agentfly eval reasoning_gym --model warm-100 --by dataset

One call, `answer`, ends the chain, and the dataset's own scorer computes the reward. The questions are those of `aiw`,
which a model of a million parameters can learn. After 100 steps of SFT it answers half of them, and the reward
teaches it more. After 200 it answers four of five. Name any of the hundred generators in `datasets`.
"""

from typing import Any

from agentfly.agents import HFAgent
from agentfly.environments.games.reasoning_gym import ReasoningGym
from agentfly.environments.recipe_config import small_model_config
from agentfly.rewards import reasoning_gym_score
from agentfly.training import WarmStart


def agent(**model: Any) -> HFAgent:
    return HFAgent(**model, tools=[ReasoningGym], reward=reasoning_gym_score)


tasks = ReasoningGym.draw_tasks("train", 4000, datasets=["aiw"])
eval_tasks = ReasoningGym.draw_tasks("validation", 200, datasets=["aiw"])
requires = ("train", "reasoning-gym")
warm_start = WarmStart(expert=2000, steps=200, train_from=100, learning_rate=1e-3)
config = small_model_config(
    max_turns=1,
    max_tokens=32,
    tasks_per_step=32,
    learning_rate=4e-4,
    warmup_steps=2,
    evaluation={"every": 20},
)
