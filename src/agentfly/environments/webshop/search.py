"""Search by BM25, with the analysis that Lucene does of English: words, no stop words, Porter's stems.

The index is made once and only read afterwards; ties go to the product that stands first, so that the same words always
find the same products in the same order.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable
from typing import Any

from agentfly.extras import needed

K1, B = 0.9, 0.4
"""How much repeating a word counts, and how much a text's length does: what Anserini sets."""
LONGEST = 2000
"""Characters of a query that are read."""
_WORD = re.compile(r"\w+(?:(?<=\d)[.,](?=\d)\w+|(?<=[^\W\d])['’.:](?=[^\W\d])\w+)*")
_POSSESSIVE = re.compile(r"['’]s$")


class Index:
    """Finds texts by words."""

    def __init__(self, texts: Iterable[str]) -> None:
        with needed("the web shop", "webshop"):
            import bm25s
            import Stemmer
            from bm25s.stopwords import STOPWORDS_EN
        self._stop = frozenset(STOPWORDS_EN)
        self._stemmer: Any = Stemmer.Stemmer("porter")
        self._stemming = threading.Lock()  # a stemmer keeps what it is working on in itself
        self._ranks = bm25s.BM25(k1=K1, b=B, method="lucene")
        analysed = [self.words(text) for text in texts]
        self._is_empty = not any(analysed)
        if not self._is_empty:
            self._ranks.index(analysed, show_progress=False)

    def words(self, text: str) -> list[str]:
        """The words that count, as stems."""
        plain = (_POSSESSIVE.sub("", word) for word in _WORD.findall(text.lower()))
        kept = [word for word in plain if word not in self._stop]
        with self._stemming:
            stems: list[str] = self._stemmer.stemWords(kept)
        return [stem or word for stem, word in zip(stems, kept, strict=True)]  # of "s" nothing would be left

    def search(self, query: str, most: int) -> list[int]:
        """Positions of the texts that share a word with the query, best first."""
        words = self.words(query[:LONGEST])
        if self._is_empty or not words:
            return []
        scores = self._ranks.get_scores(words)
        found = scores.nonzero()[0]
        best = found[(-scores[found]).argsort(kind="stable")][:most]
        return [int(position) for position in best]
