"""A catalog with its search index: immutable, cached per process and shared by all instances."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from agentfly.environments.webshop.generated import MAX_PRODUCTS, generate_catalog
from agentfly.environments.webshop.official import FILES, read_catalog
from agentfly.environments.webshop.product import ShopProduct
from agentfly.environments.webshop.search import SearchIndex
from agentfly.errors import DataError

MAX_RESULTS = 50
"""Maximum number of search results."""
_MAX_CACHED = 8
"""Shops cached per process; the oldest is evicted first."""
_shops: dict[str, Shop] = {}
_lock = threading.Lock()


class Shop:
    """A catalog with a search index."""

    def __init__(self, name: str, products: Iterable[ShopProduct]) -> None:
        self.name = name
        self._products = tuple(products)
        self._by_asin = {product.asin: product for product in self._products}
        self._index = SearchIndex(product.search_text for product in self._products)

    def __len__(self) -> int:
        return len(self._products)

    def __contains__(self, asin: str) -> bool:
        return asin in self._by_asin

    def __getitem__(self, asin: str) -> ShopProduct:
        return self._by_asin[asin]

    def search(self, keywords: str) -> Sequence[ShopProduct]:
        """Matching products, best first."""
        return [self._products[position] for position in self._index.search(keywords, MAX_RESULTS)]


def open_shop(name: str) -> Shop:
    """The shop of this name, from the cache if it is there; building one is slow.

    `official` has the 1,000 products of the small official set, `official/all` all of them, and `generated/1000/7` has
    1,000 products generated with seed 7.
    """
    with _lock:
        if name not in _shops:
            shop = Shop(name, _read_products(name))
            while len(_shops) >= _MAX_CACHED:
                del _shops[next(iter(_shops))]
            _shops[name] = shop
        return _shops[name]


def find_cached_shop(name: str) -> Shop | None:
    """The shop if it is cached."""
    return _shops.get(name)


def _read_products(name: str) -> Iterable[ShopProduct]:
    if name in FILES:
        return [entry.product for entry in read_catalog(name)]
    kind, _, numbers = name.partition("/")
    size, _, seed = numbers.partition("/")
    if kind == "generated" and size.isdecimal() and seed.isdecimal() and 1 <= int(size) <= MAX_PRODUCTS:
        return generate_catalog(int(size), int(seed))
    raise DataError(
        f"there is no shop {name!r:.80}; there are {', '.join(FILES)} and generated/PRODUCTS/SEED, "
        f"with up to {MAX_PRODUCTS} products"
    )
