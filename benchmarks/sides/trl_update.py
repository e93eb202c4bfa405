"""TRL: `GRPOTrainer.training_step` over micro-batches and the optimizer step; only the rollout is replaced."""

import tempfile
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from benchmarks.sides.serve import TOKENIZER
from benchmarks.sides.update_work import LEARNING_RATE, Chain, Work, measure

ROWS = 8
"""TRL's default number of rows in a micro-batch."""


def trainer_of(work: Work) -> GRPOTrainer:
    options = GRPOConfig(
        output_dir=tempfile.mkdtemp(), use_cpu=True, bf16=False, report_to=[], learning_rate=LEARNING_RATE,
        per_device_train_batch_size=min(ROWS, work.chains), gradient_accumulation_steps=-(-work.chains // ROWS),
        num_generations=work.chains, gradient_checkpointing=False, temperature=1.0, beta=0.0, loss_type="dapo",
    )  # fmt: skip
    rows = Dataset.from_list([{"prompt": "one"}] * 8)
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    return GRPOTrainer(
        model=work.model(), reward_funcs=lambda **_: [0.0], args=options, train_dataset=rows, processing_class=tokenizer
    )


def batch_of(chains: list[Chain], items: int) -> dict[str, Any]:
    """The layout of `_generate_and_score_completions`: prompts padded on the left, completions on the right."""

    def pad(rows: list[list[int]], left: bool = False) -> torch.Tensor:
        longest = max(map(len, rows))
        return torch.tensor([[0] * (longest - len(r)) + r if left else r + [0] * (longest - len(r)) for r in rows])

    return {
        "prompt_ids": pad([chain.prompt for chain in chains], left=True),
        "prompt_mask": pad([[1] * len(chain.prompt) for chain in chains], left=True),
        "completion_ids": pad([chain.completion for chain in chains]),
        "completion_mask": pad([[1] * len(chain.completion) for chain in chains]),
        "tool_mask": pad([chain.mask for chain in chains]),
        "advantages": torch.tensor([chain.advantage for chain in chains]),
        "num_items_in_batch": torch.tensor(float(items)),
    }


def main() -> None:
    torch.set_num_threads(1)
    work = Work.from_arguments()
    trainer, chains = trainer_of(work), work.trajectories()
    steps = trainer.args.gradient_accumulation_steps
    trainer.create_optimizer()
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = steps
    trainer._prepare_inputs = lambda inputs: inputs
    items = sum(sum(chain.mask) for chain in chains)

    def update() -> float:
        # TRL does not sort the chains of a step by length.
        for start in range(0, len(chains), ROWS):
            trainer.training_step(trainer.model, batch_of(chains[start : start + ROWS], items), None)
        norm = torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
        trainer.optimizer.step()
        trainer.model.zero_grad()
        return float(norm)

    measure(work, update)


if __name__ == "__main__":
    main()
