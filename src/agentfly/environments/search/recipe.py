"""Question answering with search: on which river is the town where Dupod Kipod was born?

    agentfly eval search --model warm --greedy
    agentfly train search --warm-start
    agentfly train search model=Qwen/Qwen2.5-3B-Instruct backend=vllm optimizer.learning_rate=1e-6

The answers cannot be memorized: people, towns and rivers are drawn from a seed, with a new encyclopedia for every 25
questions, and evaluation questions share no name with training questions. A search returns one article, which names
what to search for next. So a question of two hops takes two searches, in the right order. The commands need a
GPU.
"""

from typing import Any

from agentfly.agents import HFAgent
from agentfly.environments.recipe_config import pretrained_model_config
from agentfly.environments.search import Search
from agentfly.rewards import qa_em
from agentfly.training import WarmStart

PROMPT = "Search, then answer in as few words as there are."


class OneArticle(Search):
    """A search that returns the best article only: several confuse a small model."""

    top_k = 1


def agent(**model: Any) -> HFAgent:
    return HFAgent(**model, tools=[OneArticle], reward=qa_em, system_prompt=PROMPT)


tasks = Search.draw_tasks("train", 4000, hops=(2,), articles=100)
eval_tasks = Search.draw_tasks("validation", 200, hops=(2,), articles=100)
requires = ("train", "search")
warm_start = WarmStart(expert=300, steps=14, learning_rate=1e-4, batch_size=16, model="smollm2-135m", template="chatml")
config = pretrained_model_config(max_turns=4, max_tokens=96, zero_variance="resample", steps=20)
