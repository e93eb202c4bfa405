"""Weights on their way from the learner to whoever samples, and the check that they arrived.

After each delivery the backend samples a few words, and the learner scores the same tokens: with the same weights, both
say the same of them. This asks of a backend only what every backend does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from random import Random

import numpy as np
import torch

from agentfly.algorithm import Piece
from agentfly.backend import Backend, Request, Speaks
from agentfly.backends.transformers import TransformersBackend
from agentfly.errors import WeightsAdrift
from agentfly.segment import Floats
from agentfly.threads import compute
from agentfly.training.learner import Learner
from agentfly.types import Completion, Sampling

_LOG = logging.getLogger(__name__)


async def publish(learner: Learner, backend: Backend, version: int, canary: Canary | None = None) -> float | None:
    """Deliver the weights as `version`, and check that they arrived; how far apart the two are on average.

    None: nothing was checked.
    """
    await backend.update_weights(deliverable(learner, backend), version)
    return None if canary is None else await canary.check(version)


def deliverable(learner: Learner, backend: Backend) -> Iterable[tuple[str, torch.Tensor]]:
    """What a backend needs: nothing where it samples from the learner's own weights, adapters where it has them.

    Any other gets all weights that change, adapters added into the matrices that they belong to.
    """
    if not isinstance(backend, TransformersBackend):
        return learner.weights(merged=True)
    theirs = backend.weights
    shared = {id(each) for each in theirs.values()}
    if all(id(each) in shared for each in learner.trained.values()):
        return ()
    if all(name in theirs for name in learner.trained):
        return learner.weights()
    if any(id(each) in shared for each in learner.model.parameters()):
        raise WeightsAdrift(
            "the backend samples from the learner's model without its adapters, which came later: make the backend of "
            "what `with_lora` returns"
        )
    return learner.weights(merged=True)


class Canary:
    """A few prompts, always the same, that show whether both sides have the same weights."""

    def __init__(
        self, learner: Learner, backend: Backend, *, prompts: int = 4, length: int = 8, tolerance: float | None = None
    ) -> None:
        """`prompts`: how many, each of `length` words and as many to sample. `tolerance`: how far apart the two may be
        on average; None takes what the coarser of the two precisions makes of equal weights."""
        self._learner, self._backend, self._length = learner, backend, length
        # Of the first words only: the last rows of the embeddings may be padding, which a server refuses.
        draw, words = Random(0), min(learner.model.get_input_embeddings().weight.shape[0], 1000)
        self._prompts = [[draw.randrange(words) for _ in range(length)] for _ in range(prompts)]
        self._tolerance = _tolerance(learner, backend) if tolerance is None else tolerance
        self._before: list[tuple[Completion, Floats]] = []
        """What the backend said last time, and what the learner found of it."""
        if backend.speaks is not Speaks.TOKENS:
            _LOG.warning("%s is not prompted with tokens: its weights are not checked", type(backend).__name__)

    async def check(self, version: int) -> float:
        """The mean difference between what backend and learner say of the same tokens. Too large a one is raised."""
        if self._backend.speaks is not Speaks.TOKENS:
            return 0.0
        said = await asyncio.gather(*map(self._sampled, range(len(self._prompts))))
        found = await compute(self._scored, said)
        apart = _apart([each.logprobs for each in said], found)
        same = bool(self._before) and all(
            list(now.token_ids) == list(then.token_ids) and np.array_equal(now.logprobs, then.logprobs)
            for now, (then, _) in zip(said, self._before, strict=True)
        )
        moved = _apart([then for _, then in self._before], found) if same else 0.0
        if apart > self._tolerance or moved > self._tolerance / 10:
            raise WeightsAdrift(self._cause(version, said, apart, same))
        self._before = list(zip(said, found, strict=True))
        return apart

    async def _sampled(self, number: int) -> Completion:
        sampling = Sampling(temperature=1.0, max_tokens=self._length, seed=number)
        return await self._backend.generate(Request(self._prompts[number], sampling))

    def _scored(self, said: Sequence[Completion]) -> list[Floats]:
        pieces = [_piece(prompt, each) for prompt, each in zip(self._prompts, said, strict=True)]
        scored = self._learner.score(pieces, 1.0)
        return [found[piece.mask] for found, piece in zip(scored, pieces, strict=True)]

    def _cause(self, version: int, said: Sequence[Completion], apart: float, same: bool) -> str:
        theirs = sorted({each for one in said for each in one.weight_versions})
        if same:
            why = "it answers as it did before the last update: the weights were not delivered"
        elif theirs != [version]:
            why = f"it says that it sampled with version {', '.join(map(str, theirs))}"
        else:
            why = (
                "only some of the weights were delivered, it computes in a lower precision, or with another temperature"
            )
        return (
            f"after weights {version} were published, {type(self._backend).__name__} and the learner differ by "
            f"{apart:.2g} in the log-probability of a token (at most {self._tolerance:.2g} is expected): {why}"
        )


def _piece(prompt: Sequence[int], said: Completion) -> Piece:
    tokens = np.array([*prompt, *said.token_ids], np.int32)
    mask = np.arange(len(tokens)) >= len(prompt)
    return Piece(tokens, mask, np.zeros(len(tokens), np.float32), np.zeros_like(tokens), np.zeros_like(tokens))


def _apart(one: Sequence[Sequence[float] | Floats], other: Sequence[Floats]) -> float:
    differences = np.abs(np.concatenate([np.asarray(each) for each in one]) - np.concatenate(other))
    return float(differences.mean()) if len(differences) else 0.0


def _tolerance(learner: Learner, backend: Backend) -> float:
    """Several times what rounding alone was measured to do: about 1e-6 in float32, up to 0.03 in bfloat16."""
    exact = isinstance(backend, TransformersBackend) and next(iter(backend.weights.values())).dtype == torch.float32
    return 1e-3 if exact and not learner.rounds else 0.1
