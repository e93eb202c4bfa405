"""BM25 search with Lucene's English analysis: word tokens, stop words removed, Porter stems.

The index is immutable. Ties go to the earlier text, so results are deterministic.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable
from typing import Any

from agentfly.extras import import_bm25s, require_extra

K1, B = 0.9, 0.4
"""BM25 term-frequency saturation and length normalization: Anserini's defaults."""
MAX_QUERY_LENGTH = 2000
"""Characters; the rest of a query is ignored."""
_WORD = re.compile(r"\w+(?:(?<=\d)[.,](?=\d)\w+|(?<=[^\W\d])['’.:](?=[^\W\d])\w+)*")
_POSSESSIVE = re.compile(r"['’]s$")


class SearchIndex:
    """A BM25 index over texts. Thread-safe."""

    def __init__(self, texts: Iterable[str]) -> None:
        bm25s = import_bm25s("the web shop", "webshop")
        with require_extra("the web shop", "webshop"):
            import Stemmer
            from bm25s.stopwords import STOPWORDS_EN
        self._stop = frozenset(STOPWORDS_EN)
        self._stemmer: Any = Stemmer.Stemmer("porter")
        self._stemmer_lock = threading.Lock()  # a stemmer is not thread-safe
        self._ranks = bm25s.BM25(k1=K1, b=B, method="lucene")
        tokens = [self.tokenize(text) for text in texts]
        self._is_empty = not any(tokens)
        if not self._is_empty:
            self._ranks.index(tokens, show_progress=False)

    def tokenize(self, text: str) -> list[str]:
        """The stems of all words but stop words."""
        plain = (_POSSESSIVE.sub("", word) for word in _WORD.findall(text.lower()))
        words = [word for word in plain if word not in self._stop]
        with self._stemmer_lock:
            stems: list[str] = self._stemmer.stemWords(words)
        return [stem or word for stem, word in zip(stems, words, strict=True)]  # the stem of "s" is empty

    def search(self, query: str, limit: int) -> list[int]:
        """Positions of at most `limit` texts that share a stem with the query, best first."""
        stems = self.tokenize(query[:MAX_QUERY_LENGTH])
        if self._is_empty or not stems:
            return []
        scores = self._ranks.get_scores(stems)
        found = scores.nonzero()[0]
        best = found[(-scores[found]).argsort(kind="stable")][:limit]
        return [int(position) for position in best]
