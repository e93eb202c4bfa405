"""The teacher of on-policy distillation: a model with the student's vocabulary that scores the student's own tokens.

It is loaded beside the learner, which compares all logits with it or scores the sampled tokens, or queried over HTTP
(`TeacherServer`). A teacher with another vocabulary is refused before training starts: its probability of a token id
would be that of another text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from agentfly.algorithms.base import SegmentArrays
from agentfly.backends.client import ClientBackend
from agentfly.backends.engine.loading import load_model, max_positions
from agentfly.backends.engine.vision import takes_images
from agentfly.errors import ConfigError
from agentfly.models import resolve
from agentfly.segment import Floats
from agentfly.templates.tokenizer import load_tokenizer
from agentfly.threads import wait_for
from agentfly.training.config import TrainConfig
from agentfly.training.memory import teacher_dtype

_PROBE_TOKENS = 512
"""Tokens, spread over the vocabulary, whose text a server has to encode as the student's tokenizer does."""


def load_teacher(config: TrainConfig, student: Any, device: torch.device, *, on_gpu: bool) -> Any:
    """Load the teacher of a run onto a device; None where there is none, or a server runs it.

    Raises ConfigError where its vocabulary, its number of positions or its kind do not fit the student.
    """
    name = config.teacher.model
    if name is None or config.teacher.base_url is not None:
        return None
    last = compare_vocabularies(config.model, name)
    teacher = load_model(resolve(name), device, teacher_dtype(config, on_gpu=on_gpu))
    # More rows than ids are padding. Fewer would be an assertion of the GPU in the first batch that has such a token,
    # without the token's name.
    rows = len(teacher.get_input_embeddings().weight)
    if rows <= last:
        raise ConfigError(
            f"teacher.model={name!r} has embeddings of {rows} tokens, and its tokenizer has ids up to {last}: resize "
            "its embeddings (resize_token_embeddings), or take the tokenizer that it was trained with"
        )
    if takes_images(teacher) or takes_images(student):
        raise ConfigError(f"teacher.model={name!r}: distillation of vision models is not supported")
    positions, available = (max_positions(model.config.get_text_config()) for model in (student, teacher))
    needed = min(config.run_options.get("context_length") or positions, positions)
    if available < needed:
        raise ConfigError(
            f"teacher.model={name!r} has {available} positions, and chains of {config.model!r} may have {needed} "
            f"tokens: write run_options.context_length={available}"
        )
    return teacher


def compare_vocabularies(student: str, teacher: str) -> int:
    """Return the highest token id. Raises ConfigError unless both tokenizers have the same ids for the same tokens."""
    vocab, teacher_vocab = (load_tokenizer(resolve(name)).backend_tokenizer.get_vocab() for name in (student, teacher))
    if vocab == teacher_vocab:
        return max(vocab.values())
    # The lowest id that differs: the tokens with high ids were added last, and differ between sizes of one family, too.
    token = min((vocab.items() ^ teacher_vocab.items()), key=lambda item: (item[1], item[0]))[0]
    entries = (f"id {ids[token]}" if token in ids else "unknown" for ids in (vocab, teacher_vocab))
    raise ConfigError(
        f"teacher.model={teacher!r} has a vocabulary of {len(teacher_vocab)} tokens, model={student!r} one of "
        f"{len(vocab)}, and they differ: {token!r} is {next(entries)} for the student, {next(entries)} for the "
        "teacher. Distillation compares probabilities of the same token ids: take a teacher with the same tokenizer"
    )


class TeacherServer:
    """A teacher behind an OpenAI-compatible server that returns `prompt_logprobs`, as vLLM does."""

    def __init__(self, config: TrainConfig) -> None:
        """Raises ConfigError if the server encodes text to other ids than the student's tokenizer."""
        assert config.teacher.model is not None
        assert config.teacher.base_url is not None
        self._model = config.teacher.model
        self._base_url = config.teacher.base_url
        tokenizer: Tokenizer = load_tokenizer(resolve(config.model)).backend_tokenizer
        size = tokenizer.get_vocab_size()
        # A server does not list its vocabulary. A text of tokens from all over ours shows whether its ids are the same.
        ids = range(0, size, max(size // _PROBE_TOKENS, 1))
        text = tokenizer.decode(list(ids), skip_special_tokens=False)
        expected = tokenizer.encode(text, add_special_tokens=False).ids
        (actual,) = wait_for(self._send(lambda client: [client.tokenize(text)]))
        if expected != actual:
            pairs = enumerate(zip(expected, actual, strict=False))
            at = next((index for index, pair in pairs if pair[0] != pair[1]), len(actual))
            raise ConfigError(
                f"teacher.model={self._model!r} at {self._base_url} has another vocabulary than model={config.model!r}"
                f": a text of {len(expected)} tokens has {len(actual)} there, and they differ from token {at} on "
                f"({expected[at : at + 3]} and {actual[at : at + 3]}). Serve a teacher with the same tokenizer"
            )

    def score_teacher(self, segments: Sequence[SegmentArrays], temperature: float) -> list[Floats]:
        """Log-probabilities of the sampled tokens, one [tokens] array per segment; `temperature` must be 1."""
        scores = wait_for(
            self._send(lambda client: [client.score_prompt(segment.tokens.tolist()) for segment in segments])
        )
        return [
            np.where(segment.mask, np.asarray(score, np.float32), np.float32(0))
            for segment, score in zip(segments, scores, strict=True)
        ]

    async def _send(self, requests: Any) -> list[Any]:
        """Send requests at once and return their results in order."""
        # Connections belong to an event loop, and `wait_for` runs each call in a new one.
        client = ClientBackend(self._model, self._base_url, prompt_format="tokens")
        try:
            return await asyncio.gather(*requests(client))
        finally:
            await client.close()
