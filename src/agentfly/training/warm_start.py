"""Warm start: a model learns to say what demonstrations say, before rewards teach it what is best to say.

The learner is the one of reinforcement learning. Every token of a demonstration that the model says counts as worth 1,
and the plain loss of that is the negative log-likelihood, as a mean over tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import numpy as np
import torch

from agentfly.algorithm import Piece
from agentfly.algorithms.loss import Loss
from agentfly.backends.transformers.loading import device_of, load_model, positions_of
from agentfly.errors import ConfigError, DataError
from agentfly.models import resolve
from agentfly.training.batch import Sample, Sequences, micro_batches
from agentfly.training.learner import Learner
from agentfly.training.trunk import Trunk
from agentfly.trajectory import Trajectory

_AT_ONCE = 512
"""Tokens whose logits are in memory at once when a fit is measured; a longer demonstration is measured alone."""


@dataclass(frozen=True, slots=True)
class Fit:
    """How well a model says what demonstrations say."""

    loss: float
    """The mean negative log-likelihood of a token that is the model's."""
    accuracy: float
    """The share of those tokens that the model finds likeliest."""
    tokens: int


@dataclass(frozen=True, slots=True)
class Imitated:
    """One step of imitation."""

    step: int
    loss: float
    """On the demonstrations of the step, before it was taken."""
    held_out: Fit | None = None
    """On demonstrations that are not learned from; None where there are none, or it was not time to look."""


def imitator(model: str, *, steps: int, learning_rate: float = 1e-5, seed: int = 0) -> Learner:
    """A learner of the model of this name or folder, for `steps` steps: the rate rises for a twentieth of them, then
    falls to 0."""
    loaded = load_model(resolve(model), device_of(None), torch.float32)
    return Learner(
        loaded, loss=Loss("plain"), learning_rate=learning_rate, schedule="linear", total_steps=steps,
        warmup_steps=steps // 20, seed=seed,
    )  # fmt: skip


def imitate(
    learner: Learner,
    demonstrations: Sequence[Trajectory],
    *,
    steps: int,
    batch_size: int = 8,
    held_out: Sequence[Trajectory] = (),
    look_every: int | None = None,
    reading: float = 0.0,
    seed: int = 0,
    watcher: Callable[[Imitated], None] | None = None,
) -> list[Imitated]:
    """Take `steps` steps towards the demonstrations, `batch_size` of their segments in each.

    The learner must have the plain loss and take one step an update. All demonstrations are seen before one is seen
    again. `look_every`: steps between two looks at those held out; None: after the last. `reading`: what a token counts
    that the model reads, against one that it says: a model from scratch learns to copy much sooner when it is not 0.
    """
    if learner.loss.surrogate != "plain":
        raise ConfigError(f"imitation minimises the plain loss, and this learner has {learner.loss.surrogate!r}")
    for name, value in (("steps", steps), ("batch_size", batch_size), ("look_every", look_every or 1)):
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, not {value}")
    if not 0 <= reading <= 1:
        raise ConfigError(f"reading is from 0 to 1, what is said counts 1; not {reading}")
    samples = [_sample(piece, reading) for piece in pieces_of(learner.model, demonstrations)]
    unseen = pieces_of(learner.model, held_out) if held_out else []
    out = []
    batches = _batches(samples, batch_size, Random(seed))
    for step in range(1, steps + 1):
        loss = learner.update(next(batches))["policy/loss"]
        due = step == steps or (look_every is not None and step % look_every == 0)
        out.append(Imitated(step, loss, fit(learner.model, unseen) if unseen and due else None))
        if watcher is not None:
            watcher(out[-1])
    return out


def pieces_of(model: Any, demonstrations: Sequence[Trajectory]) -> list[Piece]:
    """What there is to learn in the demonstrations: their segments as arrays."""
    pieces = [Piece.of(segment) for chain in demonstrations for segment in chain.segments if segment.sampled]
    if not pieces:
        raise DataError("there is nothing to imitate: no demonstration has a reply in it")
    most, longest = positions_of(model.config.get_text_config()), max(len(piece.tokens) for piece in pieces)
    if longest > most:
        raise DataError(
            f"a demonstration has {longest} tokens, and the model can tell the places of {most}; shorten it"
        )
    return pieces


@torch.no_grad()
def fit(model: Any, pieces: Sequence[Piece]) -> Fit:
    """How well the model says what the pieces say."""
    trunk, tokens, loss, right = Trunk(model), 0, 0.0, 0
    for batch in micro_batches(pieces, _AT_ONCE, lambda piece: len(piece.tokens), padded=not trunk.packed):
        sequences = Sequences.of(batch)
        wanted = torch.from_numpy(sequences.targets).long().to(trunk.device)
        logits = trunk.logits(sequences).float()
        loss += float(torch.nn.functional.cross_entropy(logits, wanted, reduction="sum"))
        right += int((logits.argmax(-1) == wanted).sum())
        tokens += len(wanted)
    return Fit(loss / tokens, right / tokens, tokens)


def _sample(piece: Piece, reading: float) -> Sample:
    worth = np.where(piece.mask, 1.0, reading).astype(np.float32)
    worth[0] = 0.0  # nothing is before it
    return Sample(replace(piece, mask=worth > 0), worth, name="demonstration")


def _batches(samples: Sequence[Sample], size: int, random: Random) -> Iterator[list[Sample]]:
    """Batches without end; every pass over the samples is in an order of its own."""
    waiting: list[Sample] = []
    while True:
        while len(waiting) < size:
            waiting += random.sample(samples, len(samples))
        yield waiting[:size]
        del waiting[:size]
