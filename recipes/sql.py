"""Train an agent that answers questions with SQL, such as: how many patients are there whose home city is Lagos?

    agentfly sft recipes/sql.py --model new --expert 4000 --steps 1600 --batch-size 16 --learning-rate 1e-3 --out warm
    agentfly train recipes/sql.py model=warm
    agentfly eval recipes/sql.py --model warm --by kind
    agentfly train recipes/sql.py model=Qwen/Qwen2.5-3B-Instruct backend=vllm optimizer.learning_rate=1e-6

The names of tables and columns differ in every database, so a correct query needs the schema. It is also run on hidden
databases with other rows, so that a constant answer gets no reward. These are questions about one table; `levels=(1, 2,
3)` makes them harder, and `tools=[SQL]` gives a larger model the tool that runs queries.
"""

from typing import Any

from agentfly.agents import HFAgent
from agentfly.environments.sql import SQL
from agentfly.rewards import sql_match
from agentfly.training import TrainConfig


def agent(**model: Any) -> HFAgent:
    tools = [SQL.sql_schema, SQL.submit_query]
    return HFAgent(**model, tools=tools, reward=sql_match)


tasks = SQL.draw_tasks("train", 4000, levels=(1,))
eval_tasks = SQL.draw_tasks("validation", 100, levels=(1,))
config = TrainConfig(
    model="tiny",
    algorithm="grpo",
    tasks_per_step=16,
    num_chains=8,
    max_turns=3,
    sampling={"max_tokens": 64},
    optimizer={"learning_rate": 3e-4, "schedule": "linear"},
    micro_batch_tokens=4096,
    steps=60,
    evaluation={"every": 10},
    checkpoint={"every": 20},
)
