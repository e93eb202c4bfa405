"""The floor: a minimal rollout loop in plain asyncio with the tokenizers library.

With `lean`, it encodes the fixed part of the prompt (system text and tools) once instead of for every chain.
"""

import asyncio
import json
import re
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer

from benchmarks.sides.serve import TOKENIZER, Case, Outcome, serve
from benchmarks.workload import SCHEMA, FakeModel, Reply, last_sum, observation, question

CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)


async def add(a: int, b: int) -> str:
    return str(a + b)


TOOLS = {"add": add}


async def generate(model: FakeModel, prompt: list[int]) -> Reply:
    """Answer after one pass of the event loop, so that chains interleave as with a server."""
    await asyncio.sleep(0)
    return model.reply(prompt)


async def run_chain(
    text: str,
    expected_sum: int,
    start: Callable[[str], list[int]],
    tokenizer: Tokenizer,
    model: FakeModel,
    turns: int,
) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    ids = start(text)
    mask, logprobs = [0] * len(ids), [0.0] * len(ids)
    for _ in range(turns):
        reply = await generate(model, ids)
        ids += reply.ids
        mask += [1] * len(reply.ids)
        logprobs += reply.logprobs
        answer = tokenizer.decode(reply.ids)
        messages.append({"role": "assistant", "content": answer})
        if not (call := CALL.search(answer)):
            break
        function = json.loads(call[1])
        result = await TOOLS[function["name"]](**function["arguments"])
        messages.append({"role": "tool", "content": result})
        observed = tokenizer.encode(observation(result)).ids
        ids += observed
        mask += [0] * len(observed)
        logprobs += [0.0] * len(observed)
    reward = float(str(expected_sum) in answer)
    return {"messages": messages, "ids": ids, "mask": mask, "logprobs": logprobs, "reward": reward}


def renderer(tokenizer: Tokenizer, *, lean: bool = False) -> Callable[[str], list[int]]:
    """Render first prompts by inserting the question into the template's text, which is rendered once."""
    template = AutoTokenizer.from_pretrained(TOKENIZER)
    ask = [{"role": "user", "content": "QUESTION"}]
    text = template.apply_chat_template(ask, tools=[SCHEMA], add_generation_prompt=True, tokenize=False)
    before, after = str(text).split("QUESTION")
    if not lean:
        return lambda question: tokenizer.encode(f"{before}{question}{after}").ids
    system, role = before.rsplit("<|im_start|>", 1)  # nothing merges across a control token, so this cut is exact
    fixed = tokenizer.encode(f"{system}<|im_start|>").ids
    return lambda question: fixed + tokenizer.encode(f"{role}{question}{after}").ids


def prepare(chains: int, turns: int, *, lean: bool = False) -> Case:
    tokenizer = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
    start = renderer(tokenizer, lean=lean)
    model = FakeModel(chains, turns, lambda text: tokenizer.encode(text).ids, start)
    work = [(question(chain), last_sum(chain, turns)) for chain in range(chains)]

    async def all_chains() -> list[dict[str, Any]]:
        return await asyncio.gather(*(run_chain(*row, start, tokenizer, model, turns) for row in work))

    return Case(lambda: asyncio.run(all_chains()), inspect)


def inspect(records: list[dict[str, Any]]) -> Outcome:
    return Outcome(
        reward=sum(record["reward"] for record in records),
        tokens=sum(len(record["ids"]) for record in records),
        sampled=sum(sum(record["mask"]) for record in records),
    )


if __name__ == "__main__":
    serve(partial(prepare, lean="lean" in sys.argv))
