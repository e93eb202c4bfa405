"""An agent that knows nothing of AgentFly, trained through the gateway.

    pip install '.[train,gateway]'
    agentfly train examples/external_agent.py

`solve` is an ordinary loop around an OpenAI-compatible API; an agent of another package, or a program in another
language, works in the same way (docs/integrations.md). The gateway records its calls token by token.
"""

import json

import httpx

from agentfly import reward
from agentfly.agents import ExternalAgent
from agentfly.environments.lookup import Lookup
from agentfly.models.lookup import TOOL_SCHEMA
from agentfly.training import TrainConfig


async def solve(question: str, base_url: str, api_key: str, env: Lookup) -> str:
    """Ask the model, run the tools that it calls, and return its final answer."""
    messages = [{"role": "user", "content": question}]
    async with httpx.AsyncClient(
        base_url=base_url, headers={"authorization": f"Bearer {api_key}"}, timeout=60
    ) as client:
        for _ in range(4):
            body = {"model": "any", "messages": messages, "tools": [TOOL_SCHEMA]}
            response = await client.post("/chat/completions", json=body)
            response.raise_for_status()
            message = response.json()["choices"][0]["message"]
            messages.append(message)
            if not message.get("tool_calls"):
                return message["content"] or ""
            for call in message["tool_calls"]:
                observation = await run_tool(env, call["function"])
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": observation})
    return ""


async def run_tool(env: Lookup, function: dict) -> str:
    try:
        arguments = json.loads(function["arguments"])
        return await env.lookup(who=str(arguments["who"]), what=str(arguments["what"]))
    except (ValueError, KeyError, TypeError) as error:
        return f"The call was not understood: {error!r}"


@reward
def exact(prediction: str, answer: str) -> float:
    return float(prediction.strip() == answer)


def agent(**model) -> ExternalAgent:
    return ExternalAgent(**model, program=solve, reward=exact)


tasks, eval_tasks = Lookup.draw_tasks("train", 1000), Lookup.draw_tasks("validation", 100)
config = TrainConfig(
    model="tiny",
    max_turns=4,
    tasks_per_step=16,
    num_chains=8,
    sampling={"max_tokens": 32},
    optimizer={"learning_rate": 5e-4},
    steps=30,
    evaluation={"every": 10},
)
