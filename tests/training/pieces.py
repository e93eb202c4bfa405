"""Segments and samples of random tokens for the learner."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np

from agentfly.algorithms.base import SegmentArrays
from agentfly.training.batch import Sample
from agentfly.training.config_records import OptimizerConfig, UpdateConfig
from agentfly.training.local_learner import LocalLearner
from tests.backends.engine.tiny import VOCABULARY


def piece(length: int, seed: int = 0, share: float = 0.5) -> SegmentArrays:
    """Tokens of which about a share was sampled, the first never and the last but one always."""
    draw = np.random.default_rng((seed, length))
    tokens = draw.integers(3, VOCABULARY, length).astype(np.int32)
    mask = draw.random(length) < share
    mask[0], mask[-1], mask[-2 if length > 2 else -1] = False, False, True
    logprobs = np.where(mask, -draw.random(length), 0).astype(np.float32)
    return SegmentArrays(tokens, mask, logprobs, np.zeros_like(tokens), np.where(mask, 0, -1).astype(np.int32))


def sample(length: int, seed: int = 0, **fields: Any) -> Sample:
    """A piece whose tokens were worth something, good or bad."""
    return sample_of(piece(length, seed), seed, **fields)


def sample_of(segment: SegmentArrays, seed: int = 0, **fields: Any) -> Sample:
    """The segment with random advantages and returns."""
    length = len(segment.tokens)
    worth = np.random.default_rng(seed).normal(size=length).astype(np.float32) * segment.mask
    returns = np.random.default_rng(seed + 1).normal(size=length).astype(np.float32) * segment.mask
    return Sample(segment, worth, **{"name": f"{seed}/0#0", "returns": returns, **fields})


def samples(*lengths: int, **fields: Any) -> list[Sample]:
    return [sample(length, seed, **fields) for seed, length in enumerate(lengths)]


def make_learner(model: Any, make: Callable[..., LocalLearner] = LocalLearner, **settings: Any) -> LocalLearner:
    """A learner in float32; settings: its arguments, and the fields of its records."""
    settings = {"learning_rate": 1e-2, "precision": "float32", **settings}
    records = {
        name: cls(**{field.name: settings.pop(field.name) for field in fields(cls) if field.name in settings})
        for name, cls in (("optimizer", OptimizerConfig), ("update", UpdateConfig))
    }
    return make(model, **records, **settings)
