"""A BM25 index: passages are found by the words that they share with the query."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from agentfly.environments.search.passages import Hit, Passage
from agentfly.extras import require_extra

LONGEST = 512
"""Words of a query that count; nobody asks for more, and a megabyte of them must hold up nobody else."""
_WORD = re.compile(r"\w+")


class BM25Index:
    """Passages by their words. English endings do not count, nor do the commonest words."""

    def __init__(self, passages: Sequence[Passage], engine: Any = None) -> None:
        """Index the passages; or use an `engine` that has indexed them before."""
        self.passages = passages
        self._reader = _Reader()
        self._engine = engine if engine is not None else self._indexed(passages)

    def _indexed(self, passages: Sequence[Passage]) -> Any:
        engine = _bm25s().BM25()
        texts = (self._reader.words(f"{each.title} {each.text}") for each in passages)
        # An empty text makes bm25s count a vocabulary of none; a word that nobody asks for does no harm.
        engine.index([each or ["\0"] for each in texts] or [["\0"]], show_progress=False)
        return engine

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        return [[Hit(self.passages[at], score) for at, score in found] for found in self.ranked(queries, k)]

    def ranked(self, queries: Sequence[str], k: int) -> list[list[tuple[int, float]]]:
        """The numbers of the best passages for each query, with their scores."""
        return [self._best(self._reader.words(query[: 40 * LONGEST])[:LONGEST], k) for query in queries]

    def _best(self, words: list[str], k: int) -> list[tuple[int, float]]:
        known = [word for word in words if word in self._engine.vocab_dict]
        if not known or not len(self.passages):
            return []
        scores = self._engine.get_scores(known)
        return best_of(scores, k, above=0.0)

    def save(self, folder: Path) -> None:
        """Write the index, but not its passages, to a folder."""
        self._engine.save(folder / "bm25", show_progress=False)

    @classmethod
    def load(cls, folder: Path, passages: Sequence[Passage]) -> BM25Index:
        """The index that was saved to a folder, mapped into memory."""
        return cls(passages, _bm25s().BM25.load(folder / "bm25", mmap=True))


def best_of(scores: Any, k: int, above: float = -np.inf) -> list[tuple[int, float]]:
    """The places of the `k` highest scores, highest first; of equals, the first."""
    scores = np.asarray(scores)
    k = min(k, len(scores))
    candidates = np.argpartition(-scores, k - 1)[:k] if 0 < k < len(scores) else np.arange(len(scores))
    if 0 < k < len(scores):  # of those that equal the last one, take the first in order
        candidates = np.flatnonzero(scores >= scores[candidates].min())
    order = candidates[np.argsort(-scores[candidates], kind="stable")][:k]
    return [(int(at), float(scores[at])) for at in order if scores[at] > above]


class _Reader:
    """Text to words. A stemmer may be used by one thread at a time, so every thread has one."""

    def __init__(self) -> None:
        self._own = threading.local()

    def words(self, text: str) -> list[str]:
        stemmer = getattr(self._own, "stemmer", None)
        if stemmer is None:
            stemmer = self._own.stemmer = _stemmer()
        words = (word for word in _WORD.findall(text.lower()) if word not in _STOP_WORDS)
        found: list[str] = stemmer.stemWords(list(words))
        return found


_STOP_WORDS = frozenset(
    """
    a an and are as at be but by for from had has have he her his if in into is it its no not of on or she such that
    the their then there these they this to was were what when where which who whose will with
    """.split()  # noqa: SIM905  (a list of quoted words is four times as long, and says no more)
)


def _bm25s() -> Any:
    with require_extra("searching by words", "search"):
        import bm25s
    return bm25s


def _stemmer() -> Any:
    with require_extra("searching by words", "search"):
        import Stemmer
    return Stemmer.Stemmer("english")
