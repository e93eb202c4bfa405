"""Questions answered with SQL: how many patients are there whose home city is Lagos?

    pip install 'agentfly-rl[train]'
    agentfly sft sql --model new --expert 4000 --steps 1600 --batch-size 16 --learning-rate 1e-3 --out warm
    agentfly train sql model=warm
    agentfly eval sql --model warm --by kind
    agentfly train sql model=Qwen/Qwen2.5-3B-Instruct backend=vllm optimizer.learning_rate=1e-6

Table and column names are drawn for every database, so a query can only be right after a look at the schema; it is
judged on hidden databases with other rows, so writing the answer as a constant earns nothing. These are questions
about one table; `levels=(1, 2, 3)` makes them harder, and `tools=[SQL]` adds the tool that runs queries, for a larger
model.
"""

from typing import Any

from agentfly.agents import HFAgent
from agentfly.environments.recipe_config import small_model_config
from agentfly.environments.sql import SQL
from agentfly.rewards import sql_match


def agent(**model: Any) -> HFAgent:
    tools = [SQL.sql_schema, SQL.submit_query]
    return HFAgent(**model, tools=tools, reward=sql_match)


tasks = SQL.draw_tasks("train", 4000, levels=(1,))
eval_tasks = SQL.draw_tasks("validation", 100, levels=(1,))
config = small_model_config(max_turns=3, max_tokens=64, steps=60)
