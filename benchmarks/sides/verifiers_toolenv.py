"""verifiers: `legacy.ToolEnv.run_rollout`, with a client that answers without a server.

The client returns a complete `Response`, so verifiers spends no time on a tokenizer, on parsing tool calls (a server
would do that) and on JSON: its figure is better than in real use. The ids are made up, with the lengths that the other
frameworks have.
"""

import asyncio
from typing import Any

import verifiers.legacy as vf
from datasets import Dataset
from verifiers.legacy.clients import Client
from verifiers.legacy.types import Response, ResponseMessage, ResponseTokens, ToolCall

from benchmarks.sides.serve import Case, Outcome, serve
from benchmarks.workload import CASES, last_sum, numbers, question, words

PROMPT_TOKENS, CALL_TOKENS, ANSWER_TOKENS, OBSERVATION_TOKENS = 196, 31, 11, 22


async def add(a: int, b: int) -> str:
    """Add two integers."""
    return str(a + b)


async def right(completion: Any, answer: str) -> float:
    return float(answer in completion[-1].content)


class FakeClient(Client):  # type: ignore[type-arg]
    """Answers by the case in the question and the number of messages."""

    def __init__(self, chains: int, turns: int) -> None:
        super().__init__(None)
        self._replies = {
            (question(chain), 1 + 2 * turn): self._message(chain, turn, turns)
            for chain in range(min(chains, CASES))
            for turn in range(turns)
        }

    @staticmethod
    def _message(chain: int, turn: int, turns: int) -> dict[str, Any]:
        prompt = PROMPT_TOKENS + turn * (CALL_TOKENS + OBSERVATION_TOKENS)
        reply = ANSWER_TOKENS if turn == turns - 1 else CALL_TOKENS
        tokens = {
            "prompt_ids": list(range(1000, 1000 + prompt)),
            "prompt_mask": [0] * prompt,
            "completion_ids": list(range(1000, 1000 + reply)),
            "completion_mask": [1] * reply,
            "completion_logprobs": [-0.25] * reply,
        }
        if turn == turns - 1:
            return {
                "content": words(chain, turn, turns),
                "tool_calls": None,
                "finish_reason": "stop",
                "tokens": tokens,
            }
        a, b = numbers(chain, turn)
        call = ToolCall(id="call", name="add", arguments=f'{{"a": {a}, "b": {b}}}')
        return {"content": "", "tool_calls": [call], "finish_reason": "tool_calls", "tokens": tokens}

    async def get_response(self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **_: Any) -> Response:
        await asyncio.sleep(0)
        reply = self._replies[prompt[0].content, len(prompt)]
        message = ResponseMessage(**{**reply, "tokens": ResponseTokens(**reply["tokens"]), "is_truncated": False})
        return Response(id="response", created=0, model=model, message=message)

    def setup_client(self, config: Any) -> None: ...
    async def to_native_tool(self, tool: Any) -> None: ...
    async def to_native_prompt(self, messages: Any) -> Any: ...
    async def get_native_response(self, *_: Any, **__: Any) -> None: ...
    async def raise_from_native_response(self, response: Any) -> None: ...
    async def from_native_response(self, response: Any) -> Any: ...
    async def close(self) -> None: ...


def prepare(chains: int, turns: int) -> Case:
    rows = Dataset.from_list([{"question": question(0), "answer": ""}])
    environment = vf.ToolEnv(tools=[add], max_turns=turns, dataset=rows, rubric=vf.Rubric(funcs=[right]))
    client = FakeClient(chains, turns)
    inputs = [
        {
            "prompt": [{"role": "user", "content": question(chain)}],
            "answer": str(last_sum(chain, turns)),
            "example_id": chain,
        }
        for chain in range(chains)
    ]

    async def all_chains() -> list[Any]:
        rollouts = (environment.run_rollout(row, client, "fake", {}, state_columns=["trajectory"]) for row in inputs)
        return await asyncio.gather(*rollouts)

    return Case(lambda: asyncio.run(all_chains()), inspect)


def inspect(outputs: list[Any]) -> Outcome:
    last = [output["trajectory"][-1]["tokens"] for output in outputs]
    return Outcome(
        reward=sum(output["reward"] for output in outputs),
        tokens=sum(len(tokens["prompt_ids"]) + len(tokens["completion_ids"]) for tokens in last),
        sampled=sum(len(step["tokens"]["completion_ids"]) for output in outputs for step in output["trajectory"]),
    )


if __name__ == "__main__":
    serve(prepare)
