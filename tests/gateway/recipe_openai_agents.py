"""The lookup task with an agent of the OpenAI Agents SDK.

agentfly train tests/gateway/recipe_openai_agents.py
"""

import json
from typing import Any

import openai
from agents import Agent, FunctionTool, OpenAIChatCompletionsModel, RunContextWrapper, Runner, set_tracing_disabled
from agents.exceptions import MaxTurnsExceeded, ModelBehaviorError

from agentfly.agents import ExternalAgent
from agentfly.environments.lookup import Lookup
from agentfly.environments.lookup.recipe import draw_tasks, exact_answer
from agentfly.models.lookup import TOOL_SCHEMA
from agentfly.training import TrainConfig

set_tracing_disabled(True)


async def solve(question: str, base_url: str, api_key: str, env: Lookup) -> str:
    """One run of the agent. The tool acts in the chain's own environment."""

    async def lookup(_: RunContextWrapper[Any], arguments: str) -> str:
        parsed = json.loads(arguments)
        return str(await env.lookup(str(parsed.get("who")), str(parsed.get("what"))))

    function = TOOL_SCHEMA["function"]
    tool = FunctionTool(
        function["name"], function["description"], function["parameters"], lookup, strict_json_schema=False
    )
    # Without TLS, which is not used here: loading the certificates would take longer than the chain.
    http = openai.DefaultAsyncHttpxClient(verify=False)
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0, http_client=http) as client:
        model = OpenAIChatCompletionsModel(model="any", openai_client=client)
        try:
            result = await Runner.run(Agent(name="lookup", model=model, tools=[tool]), question, max_turns=4)
        except (MaxTurnsExceeded, ModelBehaviorError):  # such as a call of a tool that does not exist
            return ""
    return str(result.final_output)


def agent(**model: Any) -> ExternalAgent:
    return ExternalAgent(**model, program=solve, reward=exact_answer)


tasks = draw_tasks(2000, seed=1)
eval_tasks = draw_tasks(200, seed=2, held_out=True)
config = TrainConfig(
    model="tiny",
    algorithm="grpo",
    tasks_per_step=16,
    num_chains=8,
    max_turns=4,
    sampling={"max_tokens": 32},
    optimizer={"learning_rate": 5e-4, "schedule": "linear"},
    micro_batch_tokens=4096,
    steps=30,
    evaluation={"every": 15},
)
