"""A catalog with its BM25 search index: immutable, cached per process and shared by all instances.

The search uses Lucene's English analysis: word tokens, stop words removed, Porter stems. Ties go to the earlier
product, so results are deterministic.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Sequence
from typing import Any

from agentfly.environments.bm25 import import_bm25s
from agentfly.environments.webshop.product import ShopProduct
from agentfly.environments.webshop.tasks import FILES, MAX_PRODUCTS, generate_catalog, read_catalog
from agentfly.errors import DataError, require_extra

K1, B = 0.9, 0.4
"""BM25 term-frequency saturation and length normalization: Anserini's defaults."""
MAX_QUERY_LENGTH = 2000
"""Characters. The rest of a query is ignored."""
_WORD = re.compile(r"\w+(?:(?<=\d)[.,](?=\d)\w+|(?<=[^\W\d])['’.:](?=[^\W\d])\w+)*")
_POSSESSIVE = re.compile(r"['’]s$")
MAX_RESULTS = 50
"""Maximum number of search results."""
_MAX_CACHED = 8
"""Shops cached per process. The oldest is evicted first."""
_shops: dict[str, Shop] = {}
_lock = threading.Lock()


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
        matches = scores.nonzero()[0]
        best = matches[(-scores[matches]).argsort(kind="stable")][:limit]
        return [int(position) for position in best]


class Shop:
    """A catalog with a search index."""

    def __init__(self, name: str, products: Iterable[ShopProduct]) -> None:
        self.name = name
        self.products = {product.asin: product for product in products}
        """By product number, in the order of the catalog."""
        self._by_position = tuple(self.products.values())
        self._index = SearchIndex(product.search_text for product in self._by_position)

    def search(self, keywords: str) -> Sequence[ShopProduct]:
        """Matching products, best first."""
        return [self._by_position[position] for position in self._index.search(keywords, MAX_RESULTS)]


def open_shop(name: str) -> Shop:
    """The shop of this name, from the cache if it is there; building one is slow.

    `official` has the 1,000 products of the small official set, `official/all` all of them, and `generated/1000/7` has
    1,000 products generated with seed 7.
    """
    with _lock:
        if name not in _shops:
            kind, _, numbers = name.partition("/")
            size, _, seed = numbers.partition("/")
            products: Iterable[ShopProduct]
            if name in FILES:
                products = [entry.product for entry in read_catalog(name)]
            elif kind == "generated" and size.isdecimal() and seed.isdecimal() and 1 <= int(size) <= MAX_PRODUCTS:
                products = generate_catalog(int(size), int(seed))
            else:
                raise DataError(
                    f"there is no shop {name!r:.80}; there are {', '.join(FILES)} and generated/PRODUCTS/SEED, "
                    f"with up to {MAX_PRODUCTS} products"
                )
            shop = Shop(name, products)
            while len(_shops) >= _MAX_CACHED:
                del _shops[next(iter(_shops))]
            _shops[name] = shop
        return _shops[name]


def find_cached_shop(name: str) -> Shop | None:
    """The shop if it is cached."""
    return _shops.get(name)
