"""Weight sync from the learner to the sampling backend, with a check that the weights arrived.

After each sync the backend samples a few tokens and the learner scores the same tokens: with equal weights, the
log-probabilities agree. This uses only what every backend provides.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from random import Random

import numpy as np
import torch

from agentfly.algorithms.base import SegmentArrays
from agentfly.backends.base import Backend, PromptFormat, Request
from agentfly.errors import WeightSyncError
from agentfly.segment import Floats
from agentfly.threads import compute
from agentfly.training.learner import Learner
from agentfly.types import Completion, Sampling

_LOG = logging.getLogger(__name__)
PROMPTS, LENGTH = 4, 8
"""Prompts of a canary at least, and their tokens; as many tokens are sampled."""


async def sync_weights(learner: Learner, backend: Backend, version: int, canary: Canary | None = None) -> float | None:
    """Send the weights as `version`; with a canary, return the mean log-probability difference it measures."""
    await backend.update_weights(weights_for(learner, backend), version)
    return None if canary is None else await canary.check(version)


def weights_for(learner: Learner, backend: Backend) -> Iterable[tuple[str, torch.Tensor]]:
    """The weights to send: none if the backend shares them, adapters if it has them, else all that change, merged."""
    engine_weights = backend.weights
    if not engine_weights:
        return learner.weights(merged=True)
    # By identity: the engine samples from the learner's own tensors, so that an update needs no copy at all.
    shared = {id(weight) for weight in engine_weights.values()}
    if all(id(weight) in shared for weight in learner.trainable_weights.values()):
        return ()
    if all(name in engine_weights for name in learner.trainable_weights):
        return learner.weights()
    if any(id(weight) in shared for weight in learner.parameters()):
        raise WeightSyncError(
            "the backend samples from the learner's model without its adapters, which were added later: create the "
            "backend from what `add_lora` returns"
        )
    return learner.weights(merged=True)


class Canary:
    """Fixed prompts that show whether backend and learner have the same weights."""

    def __init__(self, learner: Learner, backend: Backend, *, tolerance: float | None = None) -> None:
        """Four prompts, or one per member of a larger fleet.

        tolerance: accepted mean difference of log-probabilities; None is several times what rounding was measured to
        do to equal weights: about 1e-6 in float32; in bfloat16 up to 0.03 before training, 0.1 after some steps of it.
        """
        self._learner = learner
        self._backend = backend
        # Only the first tokens: the last rows of the embeddings may be padding, which a server refuses.
        draw = Random(0)
        vocab = min(learner.vocab_size, 1000)
        members = backend.members or (backend,)
        count = max(PROMPTS, len(members))
        self._prompts = [[draw.randrange(vocab) for _ in range(LENGTH)] for _ in range(count)]
        if tolerance is None:
            dtypes = {weight.dtype for weight in members[0].weights.values()}
            tolerance = 1e-3 if dtypes == {torch.float32} and not learner.low_precision else 0.1
        self.tolerance = tolerance
        """Accepted mean difference of log-probabilities, in nats per token; see `check`."""
        self._last_difference = 0.0
        self._last: list[tuple[Completion, Floats]] = []
        """The backend's completions of the last check, and the learner's log-probabilities of them."""
        if backend.prompt_format is not PromptFormat.TOKENS:
            _LOG.warning("%s is not prompted with tokens: its weights are not checked", type(backend).__name__)

    async def check(self, version: int) -> float:
        """Return the mean log-probability difference; raise WeightSyncError where it exceeds the tolerance.

        Rounding in bfloat16 grows while a model is trained. Up to five times the tolerance is accepted where the
        difference grows slowly: to at most three times that of the last check. Lost weights make it jump.
        """
        if self._backend.prompt_format is not PromptFormat.TOKENS:
            return 0.0
        requests = [
            Request(prompt, Sampling(temperature=1.0, max_tokens=LENGTH, seed=number))
            for number, prompt in enumerate(self._prompts)
        ]
        completions = await asyncio.gather(*map(self._backend.generate, requests))
        scores = await compute(self._score, completions)
        difference = _mean_difference([completion.logprobs for completion in completions], scores)
        # A backend, or a member of a fleet, that answers exactly as before while the learner has moved never received
        # the weights. A small update stays below the tolerance, so the first comparison alone would not notice.
        moved = [
            _mean_difference([before], [score])
            for now, score, (then, before) in zip(completions, scores, self._last, strict=False)
            if list(now.token_ids) == list(then.token_ids) and np.array_equal(now.logprobs, then.logprobs)
        ]
        unchanged = max(moved, default=0.0) > self.tolerance / 10
        accepted = min(max(self.tolerance, 3 * self._last_difference), 5 * self.tolerance)
        if difference > accepted or unchanged:
            raise WeightSyncError(self._explain(version, completions, difference, accepted, unchanged=unchanged))
        self._last_difference = difference
        self._last = list(zip(completions, scores, strict=True))
        return difference

    def _score(self, completions: Sequence[Completion]) -> list[Floats]:
        segments = [
            SegmentArrays.from_tokens([*prompt, *completion.token_ids], len(prompt))
            for prompt, completion in zip(self._prompts, completions, strict=True)
        ]
        scores = self._learner.score(segments, 1.0)
        return [logprobs[segment.mask] for logprobs, segment in zip(scores, segments, strict=True)]

    def _explain(
        self, version: int, completions: Sequence[Completion], difference: float, accepted: float, *, unchanged: bool
    ) -> str:
        versions = sorted({number for completion in completions for number in completion.weight_versions})
        if unchanged:
            cause = "it answers as it did before the last update: the weights were not delivered"
        elif versions != [version]:
            cause = f"it reports that it sampled with version {', '.join(map(str, versions))}"
        else:
            cause = "only some of the weights arrived, it computes in a lower precision, or with another temperature"
        return (
            f"after weights {version} were sent, {type(self._backend).__name__} and the learner differ by "
            f"{difference:.2g} in the log-probability of a token (at most {accepted:.2g} is expected): {cause}"
        )


def _mean_difference(one: Sequence[Sequence[float] | Floats], other: Sequence[Floats]) -> float:
    differences = np.abs(np.concatenate([np.asarray(values) for values in one]) - np.concatenate(other))
    return float(differences.mean()) if len(differences) else 0.0
