"""Supervised fine-tuning (SFT) on demonstrations, before reinforcement learning.

It uses the learner of reinforcement learning: with an advantage of 1 on every token of the assistant, the plain loss is
the negative log-likelihood, averaged over tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field

from agentfly.algorithms.base import SegmentArrays
from agentfly.algorithms.loss import Loss
from agentfly.backends.engine.loading import load_model, max_positions, resolve_device
from agentfly.errors import ConfigError, DataError
from agentfly.models import resolve
from agentfly.training.batch import Sample, split_micro_batches
from agentfly.training.config_records import OptimizerConfig, UpdateConfig
from agentfly.training.local_learner import LocalLearner
from agentfly.training.model import Backbone
from agentfly.training.optimizer import warn_of_unusual_rate
from agentfly.trajectory import Trajectory
from agentfly.validation import PositiveInt, validate

_LOG = logging.getLogger(__name__)
_MAX_NAMED = 20
"""Demonstrations that are named in one message."""
_FIT_TOKENS = 512
"""Tokens whose logits are in memory at once in `measure_fit`; a longer demonstration is measured alone."""


@dataclass(frozen=True, slots=True)
class DemonstrationFit:
    """How well a model predicts demonstrations, over the tokens of the assistant."""

    loss: float
    """Mean negative log-likelihood per token, in nats."""
    accuracy: float
    """Fraction of tokens that are the model's most likely one."""
    tokens: int


@dataclass(frozen=True, slots=True)
class SftStep:
    """One optimizer step of SFT."""

    step: int
    loss: float
    """On the demonstrations of the step, before it was taken."""
    validation: DemonstrationFit | None = None
    """On held-out demonstrations; None where there are none, or none was due."""


def build_sft_learner(
    model: str, *, steps: int, learning_rate: float = 1e-5, train_tower: bool = False, seed: int = 0
) -> LocalLearner:
    """A learner for `steps` steps of SFT: linear warm-up over a twentieth of them, then linear decay to 0.

    model: a name of `agentfly models`, a local folder, or a hub name.
    train_tower: whether the vision tower of a vision model is trained.
    """
    loaded_model = load_model(resolve(model), resolve_device(None), torch.float32)
    warn_of_unusual_rate(loaded_model, learning_rate)
    return LocalLearner(
        loaded_model,
        loss=Loss("plain"),
        optimizer=OptimizerConfig(learning_rate=learning_rate, schedule="linear", warmup_steps=steps // 20),
        update=UpdateConfig(total_steps=steps, seed=seed),
        train_tower=train_tower,
    )


def train_sft(
    learner: LocalLearner,
    demonstrations: Sequence[Trajectory],
    *,
    steps: int,
    batch_size: int = 8,
    validation: Sequence[Trajectory] = (),
    validate_every: int | None = None,
    prompt_loss_weight: float = 0.0,
    seed: int = 0,
    on_step: Callable[[SftStep], None] | None = None,
) -> list[SftStep]:
    """Train `steps` optimizer steps on the demonstrations, with `batch_size` segments each.

    The learner must have the plain loss and take one step per update. Each epoch is a random order of all segments.
    validation: demonstrations to measure, every `validate_every` steps (None: after the last step only).
    prompt_loss_weight: loss weight of prompt and observation tokens (0 to 1); above 0, a model from scratch learns to
    copy much sooner.
    """
    if learner.loss.surrogate != "plain":
        raise ConfigError(f"SFT minimizes the plain loss, and this learner has {learner.loss.surrogate!r}")
    validate("steps", steps, PositiveInt)
    validate("batch_size", batch_size, PositiveInt)
    validate("validate_every", validate_every, PositiveInt | None)
    validate("prompt_loss_weight", prompt_loss_weight, Annotated[float, Field(ge=0, le=1)])
    samples = []
    for segment in demonstration_segments(learner.model, demonstrations):
        weights = np.where(segment.mask, 1.0, prompt_loss_weight).astype(np.float32)
        weights[0] = 0.0  # the first token has nothing before it to be predicted from
        weights[segment.image_positions] = 0.0  # placeholders, which no model has to predict
        samples.append(Sample(replace(segment, mask=weights > 0), weights, name="demonstration"))
    held_out = demonstration_segments(learner.model, validation) if validation else []
    batches = _sample_batches(samples, batch_size, Random(seed))
    out = []
    for step in range(1, steps + 1):
        loss = learner.update(next(batches))["policy/loss"]
        due = step == steps or (validate_every is not None and step % validate_every == 0)
        out.append(SftStep(step, loss, measure_fit(learner.model, held_out) if held_out and due else None))
        if on_step is not None:
            on_step(out[-1])
    return out


def demonstration_segments(model: Any, demonstrations: Sequence[Trajectory]) -> list[SegmentArrays]:
    """The segments with replies, of the demonstrations that fit the model. Raises DataError where there are none."""
    segments = [
        SegmentArrays.from_segment(segment)
        for chain in select_fitting(model, demonstrations)
        for segment in chain.segments
        if segment.num_sampled_tokens
    ]
    if not segments:
        raise DataError("there is nothing to imitate: no demonstration contains a reply")
    return segments


def select_fitting(model: Any, demonstrations: Sequence[Trajectory]) -> list[Trajectory]:
    """The demonstrations that fit the positions of the model; the others are counted and named in the log.

    Raises DataError where all are too long.
    """
    limit = max_positions(model.config.get_text_config())
    lengths = [max((len(segment.tokens) for segment in chain.segments), default=0) for chain in demonstrations]
    fitting = [chain for chain, length in zip(demonstrations, lengths, strict=True) if length <= limit]
    too_long = [
        f"{chain.task.id or chain.group} ({length})"
        for chain, length in zip(demonstrations, lengths, strict=True)
        if length > limit
    ]
    if too_long:
        names = ", ".join(too_long[:_MAX_NAMED]) + (", …" if len(too_long) > _MAX_NAMED else "")
        problem = f"{len(too_long)} of {len(lengths)} demonstrations are longer than the {limit} positions of the model"
        if not fitting:
            raise DataError(f"{problem}: rows (tokens) {names}; shorten them, or take a model with more positions")
        _LOG.warning("%s and are left out: rows (tokens) %s", problem, names)
    return fitting


@torch.no_grad()
def measure_fit(model: Any, segments: Sequence[SegmentArrays]) -> DemonstrationFit:
    """Loss and accuracy of the model on the masked tokens of the segments."""
    backbone = Backbone(model)
    tokens = correct = 0
    loss = 0.0
    batches = split_micro_batches(
        segments, _FIT_TOKENS, lambda segment: len(segment.tokens), padded=not backbone.packed
    )
    for batch in batches:
        targets = torch.from_numpy(np.concatenate([segment.tokens[segment.mask] for segment in batch])).long()
        targets = targets.to(backbone.device)  # [sampled]
        logits = backbone.logits(batch).float()  # [sampled, vocab]
        loss += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
        correct += int((logits.argmax(-1) == targets).sum())
        tokens += len(targets)
    return DemonstrationFit(loss / tokens, correct / tokens, tokens)


def _sample_batches(samples: Sequence[Sample], size: int, random: Random) -> Iterator[list[Sample]]:
    """An endless stream of batches; each epoch is a new random order."""
    queue: list[Sample] = []
    while True:
        while len(queue) < size:
            queue += random.sample(samples, len(samples))
        yield queue[:size]
        del queue[:size]
