"""AgentFly: `await agent.run(rows)` through the public API, with a backend that answers at once."""

import asyncio
from typing import Any

from tokenizers import Tokenizer

from agentfly import reward, tool
from agentfly.agents import HFAgent
from agentfly.backends.base import Backend, Request
from agentfly.types import Completion, FinishReason
from benchmarks.sides.floor import renderer
from benchmarks.sides.serve import TOKENIZER, Case, Outcome, serve
from benchmarks.workload import FakeModel, last_sum, question


@tool
async def add(a: int, b: int) -> str:
    """Add two integers."""
    return str(a + b)


@reward
async def right(prediction: str, expected: int) -> float:
    return float(str(expected) in prediction)


class FakeBackend(Backend):
    """Answers after one pass of the event loop, so that chains interleave as with a server."""

    weight_version = 0

    def __init__(self, model: FakeModel) -> None:
        self.model = model

    async def generate(self, request: Request) -> Completion:
        await asyncio.sleep(0)
        reply = self.model.reply(request.prompt)
        return Completion(reply.ids, reply.logprobs, [0] * len(reply.ids), FinishReason.STOP)


def fake_model(chains: int, turns: int) -> FakeModel:
    tokenizer = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
    return FakeModel(chains, turns, lambda text: tokenizer.encode(text).ids, renderer(tokenizer))


def agent_on(backend: Backend, add: Any = add) -> HFAgent:
    return HFAgent(model_name_or_path=str(TOKENIZER), tools=[add], reward=right, template="qwen2.5", backend=backend)


def rows(chains: int, turns: int) -> list[dict[str, Any]]:
    return [
        {"messages": [{"role": "user", "content": question(chain)}], "expected": last_sum(chain, turns)}
        for chain in range(chains)
    ]


def prepare(chains: int, turns: int) -> Case:
    agent = agent_on(FakeBackend(fake_model(chains, turns)))
    work = rows(chains, turns)
    return Case(lambda: asyncio.run(agent.run(work, max_turns=turns, num_chains=1)), inspect)


def inspect(result: Any) -> Outcome:
    segments = [segment for trajectory in result.trajectories for segment in trajectory.segments]
    return Outcome(
        reward=sum(result.rewards),
        tokens=sum(len(segment) for segment in segments),
        sampled=sum(int(segment.mask.sum()) for segment in segments),
    )


if __name__ == "__main__":
    serve(prepare)
