"""Questions answered with SQL: how many patients are there whose home city is Lagos?

    agentfly eval sql --model warm --by kind
    agentfly train sql --warm-start
    agentfly train sql model=Qwen/Qwen2.5-3B-Instruct backend=vllm optimizer.learning_rate=1e-6

Table and column names are drawn for every database, so a query can only be right after a look at the schema. It is
judged on hidden databases with other rows, so writing the answer as a constant earns nothing. The commands
need a GPU. `levels=(1, 2, 3)` makes the questions harder, and `tools=[SQL]` adds the tool that runs queries, for a
larger model.
"""

from typing import Any

from agentfly.agents import HFAgent
from agentfly.environments.recipe_config import pretrained_model_config
from agentfly.environments.sql import SQL
from agentfly.rewards import sql_match
from agentfly.training import WarmStart


def agent(**model: Any) -> HFAgent:
    tools = [SQL.sql_schema, SQL.submit_query]
    return HFAgent(**model, tools=tools, reward=sql_match)


tasks = SQL.draw_tasks("train", 4000, levels=(1, 2))
eval_tasks = SQL.draw_tasks("validation", 200, levels=(1, 2))
requires = ("train",)
warm_start = WarmStart(expert=450, steps=24, learning_rate=1e-4, batch_size=16, model="smollm2-135m", template="chatml")
config = pretrained_model_config(max_turns=3, max_tokens=96, zero_variance="resample", steps=20)
