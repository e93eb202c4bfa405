"""Questions of HotpotQA with passages to search: the paper's task Retrieve.

    agentfly train benchmarks/paper/retrieve.py model=Qwen/Qwen2.5-3B-Instruct --on verl nodes=1 gpus=8

Data: HotpotQA in `$AGENTFLY_DATA/retrieval` (docs/search.md). A question brings its own passages; the original
searched a Wikipedia dump with embeddings: `agentfly search build --kind dense`, and a subclass of Search with `source`.
"""

from typing import Any

from agentfly.agents import ReactAgent
from agentfly.environments.search import Search, hotpotqa_tasks
from agentfly.rewards import qa_f1_format
from agentfly.training import TrainConfig


def agent(**model: Any) -> ReactAgent:
    return ReactAgent(**model, tools=[Search], reward=qa_f1_format)


tasks = hotpotqa_tasks("train")[:8000]
eval_tasks = hotpotqa_tasks("test")[:500]
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
    steps=130,
    evaluation={"every": 10},
    checkpoint={"every": 10},
)
