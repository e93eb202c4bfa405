"""TRL: `GRPOTrainer._generate`, its own tool loop; only the call to the model is replaced.

The trainer has a random model of a few thousand weights that is never run. The tool tables are filled like in
`_generate_and_score_completions`, and the reward function is called directly. The tool is synchronous, which is cheaper
in TRL: an asynchronous one runs in another thread, one sample after another.
"""

import tempfile
from typing import Any

from datasets import Dataset
from tokenizers import Tokenizer
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from benchmarks.sides.serve import TOKENIZER, Case, Outcome, serve
from benchmarks.workload import FakeModel, last_sum, question


def add(a: int, b: int) -> str:
    """
    Add two integers.

    Args:
        a: The first.
        b: The second.
    """
    return str(a + b)


def right(completions: list[Any], sums: list[int]) -> list[float]:
    return [float(str(s) in messages[-1]["content"]) for messages, s in zip(completions, sums, strict=True)]


def build_trainer(turns: int) -> GRPOTrainer:
    tiny = Qwen2Config(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
    )
    options = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        bf16=False,
        report_to=[],
        max_completion_length=100_000,
        max_tool_calling_iterations=turns,
    )
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": question(0)}]}] * 8)
    return GRPOTrainer(
        model=Qwen2ForCausalLM(tiny),
        reward_funcs=right,
        args=options,
        train_dataset=rows,
        processing_class=AutoTokenizer.from_pretrained(TOKENIZER),
        tools=[add],
    )


def prepare(chains: int, turns: int) -> Case:
    trainer = build_trainer(turns)
    tokenizer = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))

    def start(text: str) -> list[int]:
        ids, _, _ = trainer._tokenize_prompts([[{"role": "user", "content": text}]])
        return list(ids[0])

    model = FakeModel(chains, turns, lambda text: tokenizer.encode(text).ids, start)

    def single_turn(prompt_ids: list[list[int]], *_: Any, **__: Any) -> tuple[list[list[int]], list[list[float]]]:
        # Copies: the trainer appends to the log-probabilities in place.
        replies = [model.reply(ids) for ids in prompt_ids]
        return [list(reply.ids) for reply in replies], [list(reply.logprobs) for reply in replies]

    trainer._generate_single_turn = single_turn
    prompts = [[{"role": "user", "content": question(chain)}] for chain in range(chains)]
    sums = [last_sum(chain, turns) for chain in range(chains)]

    def run() -> tuple[Any, ...]:
        trainer._sync_tool_dicts = [{"add": add} for _ in prompts]
        trainer._async_tool_dicts = [{} for _ in prompts]
        prompt_ids, completion_ids, mask, completions, *_ = trainer._generate(prompts)
        return prompt_ids, completion_ids, mask, right(completions, sums)

    return Case(run, inspect)


def inspect(result: tuple[Any, ...]) -> Outcome:
    prompt_ids, completion_ids, mask, rewards = result
    return Outcome(
        reward=sum(rewards),
        tokens=sum(map(len, prompt_ids)) + sum(map(len, completion_ids)),
        sampled=sum(map(sum, mask)),
    )


if __name__ == "__main__":
    serve(prepare)
