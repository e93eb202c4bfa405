"""The floor: what any honest loop must do, in plain asyncio over the tokenizers library, and nothing more.

Run with `lean`, it encodes the fixed part of the prompt (system text and tools) once and not for every chain.
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
from benchmarks.workload import SCHEMA, FakeModel, Reply, expected, observation, question

CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)


async def add(a: int, b: int) -> str:
    return str(a + b)


TOOLS = {"add": add}


async def generate(model: FakeModel, prompt: list[int]) -> Reply:
    """Zero latency, but not zero: every chain waits for its turn as it would for a server."""
    await asyncio.sleep(0)
    return model.reply(prompt)


async def run_chain(
    text: str,
    sum_wanted: int,
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
        said = tokenizer.decode(reply.ids)
        messages.append({"role": "assistant", "content": said})
        if not (call := CALL.search(said)):
            break
        wanted = json.loads(call[1])
        answer = await TOOLS[wanted["name"]](**wanted["arguments"])
        messages.append({"role": "tool", "content": answer})
        shown = tokenizer.encode(observation(answer)).ids
        ids += shown
        mask += [0] * len(shown)
        logprobs += [0.0] * len(shown)
    reward = float(str(sum_wanted) in said)
    return {"messages": messages, "ids": ids, "mask": mask, "logprobs": logprobs, "reward": reward}


def renderer(tokenizer: Tokenizer, *, lean: bool = False) -> Callable[[str], list[int]]:
    """First prompts by splicing the question into the template's text, which is rendered once."""
    template = AutoTokenizer.from_pretrained(TOKENIZER)
    ask = [{"role": "user", "content": "QUESTION"}]
    text = template.apply_chat_template(ask, tools=[SCHEMA], add_generation_prompt=True, tokenize=False)
    before, after = str(text).split("QUESTION")
    if not lean:
        return lambda asked: tokenizer.encode(f"{before}{asked}{after}").ids
    system, role = before.rsplit("<|im_start|>", 1)  # nothing merges across a control token, so this cut is exact
    fixed = tokenizer.encode(f"{system}<|im_start|>").ids
    return lambda asked: fixed + tokenizer.encode(f"{role}{asked}{after}").ids


def prepare(chains: int, turns: int, *, lean: bool = False) -> Case:
    tokenizer = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
    start = renderer(tokenizer, lean=lean)
    model = FakeModel(chains, turns, lambda text: tokenizer.encode(text).ids, start)
    work = [(question(chain), expected(chain, turns)) for chain in range(chains)]

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
