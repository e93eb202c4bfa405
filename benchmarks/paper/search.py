"""Questions of HotpotQA with a web search: the paper's task Search.

    agentfly train benchmarks/paper/search.py model=Qwen/Qwen2.5-3B-Instruct --on verl nodes=1 gpus=8

Data: HotpotQA in `$AGENTFLY_DATA/retrieval` (docs/search.md), and a key in SERPER_API_KEY. With many machines,
let them share one cache and rate limit: `agentfly search serve serper`.
"""

from typing import Any

from agentfly.agents import ReactAgent
from agentfly.environments.search import hotpotqa_tasks
from agentfly.rewards import qa_f1_format
from agentfly.tools import google_search
from agentfly.training import TrainConfig


def agent(**model: Any) -> ReactAgent:
    return ReactAgent(**model, tools=[google_search], reward=qa_f1_format)


tasks = [{"question": row["question"], "answer": row["answer"]} for row in hotpotqa_tasks("train")[:8000]]
eval_tasks = [{"question": row["question"], "answer": row["answer"]} for row in hotpotqa_tasks("test")[:500]]
config = TrainConfig(
    model="Qwen/Qwen2.5-3B-Instruct",
    algorithm="reinforce_pp",
    tasks_per_step=128,
    num_chains=1,
    max_turns=4,
    sampling={"max_tokens": 512},
    kl={"coef": 1e-3, "estimator": "k2"},
    loss={"entropy_coef": 1e-3},
    optimizer={"learning_rate": 5e-7},
    gradient_checkpointing=True,
    steps=70,
    evaluation={"every": 10},
    checkpoint={"every": 10},
)
