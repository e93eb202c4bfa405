"""Samples that go through the model together, as the tensors that a loss is made of."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from agentfly.algorithms.loss import Tokens
from agentfly.errors import ModelBroken, RecordError
from agentfly.segment import Floats
from agentfly.training.batch import Sample, Sequences
from agentfly.training.logprobs import Scores


class MicroBatch:
    """Samples on a device: only their sampled tokens are in the tensors, one after the other."""

    def __init__(self, samples: Sequence[Sample], shares: Sequence[float], device: torch.device) -> None:
        """`shares`: of each sample, the share that one of its tokens has in the loss."""
        self.samples, self._device = samples, device
        self.sequences = Sequences.of([sample.piece for sample in samples])
        self.temperatures = [sample.temperature for sample in samples]
        self._shares = np.repeat(shares, self.sequences.counts)

    def tokens(self, scores: Scores, *, is_first: bool, with_reference: bool, with_entropy: bool) -> Tokens:
        """What the loss is given. `is_first`: the model is still the one that the ratios refer to."""
        return Tokens(
            logprobs=scores.logprobs,
            old=scores.logprobs.detach() if is_first else self.gathered("old"),
            sampled=self._moved([sample.piece.logprobs[sample.piece.mask] for sample in self.samples]),
            advantages=self.gathered("advantages"),
            weights=self._moved([self._shares]),
            sequence=self._sequence,
            sequences=len(self.samples),
            reference=self.gathered("reference") if with_reference else None,
            entropies=scores.entropies if with_entropy else scores.entropies.detach(),
        )

    def gathered(self, field: str) -> Tensor:
        """A field of the samples at their sampled tokens."""
        for sample in self.samples:
            if getattr(sample, field) is None:
                raise RecordError(f"sample {sample.name} has no {field}, which this learner needs")
        return self._moved([getattr(sample, field)[sample.piece.mask] for sample in self.samples])

    def refuse_broken(self, loss: Tensor, terms: Tensor, what: str) -> None:
        """Raise where the loss is no number, and name the samples with terms that are none."""
        if not loss.isfinite():
            bad = self._sequence[~terms.isfinite()].unique().tolist()
            wrong = [self.samples[at] for at in bad] or self.samples
            raise ModelBroken(f"{what} is {loss.item()}: look at {names(wrong)}")

    @cached_property
    def _sequence(self) -> Tensor:
        counts = torch.tensor(self.sequences.counts)
        return torch.arange(len(counts)).repeat_interleave(counts).to(self._device)

    def _moved(self, arrays: Sequence[Floats]) -> Tensor:
        return torch.from_numpy(np.concatenate(arrays).astype(np.float32)).to(self._device)


def names(samples: Sequence[Sample]) -> str:
    """Some of the samples' names, for a message."""
    some = ", ".join(sample.name or "one without a name" for sample in samples[:5])
    return f"the samples {some}" + (f" and {len(samples) - 5} more" if len(samples) > 5 else "")
