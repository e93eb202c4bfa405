"""AgentFly: `LocalLearner.update`, including the optimizer step."""

import numpy as np
import torch

from agentfly.algorithms.base import SegmentArrays
from agentfly.training.batch import Sample
from agentfly.training.config_records import OptimizerConfig, UpdateConfig
from agentfly.training.local_learner import LocalLearner
from benchmarks.sides.update_work import LEARNING_RATE, Chain, Work, measure

TOKENS = 2048
"""Tokens per micro-batch: about as many as TRL's eight rows hold without padding."""


def sample_of(chain: Chain) -> Sample:
    tokens = np.array([*chain.prompt, *chain.completion], np.int32)
    mask = np.array([*[0] * len(chain.prompt), *chain.mask], bool)
    zeros = np.zeros(len(tokens), np.float32)
    return Sample(
        SegmentArrays(tokens, mask, zeros, tokens * 0, tokens * 0), (mask * chain.advantage).astype(np.float32)
    )


def main() -> None:
    torch.set_num_threads(1)
    work = Work.from_arguments()
    learner = LocalLearner(
        work.model(),
        optimizer=OptimizerConfig(learning_rate=LEARNING_RATE),
        update=UpdateConfig(micro_batch_tokens=round(TOKENS * work.scale), precision="float32"),
    )
    samples = [sample_of(chain) for chain in work.trajectories()]
    measure(work, lambda: learner.update(samples)["policy/grad_norm"])


if __name__ == "__main__":
    main()
