"""Question answering with search: on which river is the town where Dupod Kipod was born?

    pip install 'agentfly-rl[train,search]'
    agentfly sft search --model new --expert 6000 --steps 2000 --learning-rate 1e-3 \
        --prompt-loss-weight 1 --out warm
    agentfly train search model=warm
    agentfly eval search --model warm --by hops
    agentfly train search model=Qwen/Qwen2.5-3B-Instruct backend=vllm optimizer.learning_rate=1e-6

The answers cannot be memorized: people, towns and rivers are drawn from a seed, with a new encyclopedia for every 25
questions, and evaluation questions share no name with training questions. A search returns one article, which names
what to search for next; so a question of two hops takes two searches, in the right order.
"""

from typing import Any

from agentfly.agents import HFAgent
from agentfly.environments.recipe_config import small_model_config
from agentfly.environments.search import Search
from agentfly.rewards import qa_em

PROMPT = "Search, then answer in as few words as there are."


class OneArticle(Search):
    """A search that returns the best article only: several confuse a small model."""

    top_k = 1


def agent(**model: Any) -> HFAgent:
    return HFAgent(**model, tools=[OneArticle], reward=qa_em, system_prompt=PROMPT)


tasks = Search.draw_tasks("train", 6000, hops=(1, 2), articles=100)
eval_tasks = Search.draw_tasks("validation", 100, hops=(1, 2), articles=100)
config = small_model_config(max_turns=4, max_tokens=48)
