"""Train an agent that answers questions by searching: on which river does the town stand where Dupod Kipod was born?

    agentfly sft recipes/search.py --model new --expert 6000 --steps 2000 --learning-rate 1e-3 \
        --prompt-loss-weight 1 --out warm
    agentfly train recipes/search.py model=warm
    agentfly eval recipes/search.py --model warm --by hops
    agentfly train recipes/search.py model=Qwen/Qwen2.5-3B-Instruct backend=vllm optimizer.learning_rate=1e-6

No model can know the answers: people, towns and rivers are drawn from a seed, with a new encyclopedia for every 25
questions, and no name of a held-out question occurs in training. A search shows one article, which names the next thing
to search for, so a question of two hops takes two searches in the right order.
"""

from typing import Any

from agentfly.agents import HFAgent
from agentfly.environments.search import Search
from agentfly.rewards import qa_em
from agentfly.training import TrainConfig

PROMPT = "Search, then answer in as few words as there are."


class OneArticle(Search):
    """An encyclopaedia, of which a search shows the best article only: small models lose their way among several."""

    top_k = 1


def agent(**model: Any) -> HFAgent:
    return HFAgent(**model, tools=[OneArticle], reward=qa_em, system_prompt=PROMPT)


tasks = Search.draw_tasks("train", 6000, hops=(1, 2), articles=100)
eval_tasks = Search.draw_tasks("validation", 100, hops=(1, 2), articles=100)
config = TrainConfig(
    model="tiny",
    algorithm="grpo",
    tasks_per_step=16,
    num_chains=8,
    max_turns=4,
    sampling={"max_tokens": 48},
    optimizer={"learning_rate": 3e-4, "schedule": "linear"},
    micro_batch_tokens=4096,
    steps=40,
    evaluation={"every": 10},
    checkpoint={"every": 20},
)
