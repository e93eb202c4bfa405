"""An agent that answers questions by searching: into which sea does the river flow on which Dupod Kipod was born?

    agentfly sft recipes/search.py --expert 500 --out warm
    agentfly train recipes/search.py model=warm
    agentfly train recipes/search.py model=Qwen/Qwen2.5-3B-Instruct backend=vllm learning_rate=1e-6
    agentfly eval recipes/search.py --model warm --by hops

Nobody can know the answers: people, towns and rivers are drawn from a seed, a new encyclopaedia for every 25 questions,
and held-out ones share not even a name with those for training. One search shows the article of one thing, which names
the next; so a question of two hops takes two searches, and the order matters.
"""

from typing import Any

from agentfly.agents import HFAgent
from agentfly.environments.search import Search, search_tasks
from agentfly.rewards import qa_em
from agentfly.training import TrainConfig

PROMPT = "Answer the question by searching, one search at a time. Your last reply is the answer and nothing else."


def agent(**model: Any) -> HFAgent:
    return HFAgent(**{"model_name_or_path": "tiny", **model}, tools=[Search], reward=qa_em, system_prompt=PROMPT)


tasks = search_tasks("train", 2000, hops=(1, 2))
eval_tasks = search_tasks("validation", 100, hops=(1, 2))
config = TrainConfig(
    model="tiny",
    algorithm="grpo",
    tasks_per_step=16,
    num_chains=8,
    max_turns=6,
    sampling={"max_tokens": 64},
    learning_rate=5e-4,
    schedule="linear",
    steps=80,
    eval_every=10,
    save_every=20,
)
