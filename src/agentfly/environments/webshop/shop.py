"""A catalogue and its search index: made once in a process, read by every instance, changed by none."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from agentfly.environments.webshop.generated import LARGEST, catalogue
from agentfly.environments.webshop.official import FILES, read_products
from agentfly.environments.webshop.product import Product
from agentfly.environments.webshop.search import Index
from agentfly.errors import DataError

FOUND = 50
"""Products that a search finds at most."""
_KEPT = 8
"""Shops that stay open in a process; the one that was opened first goes first."""
_shops: dict[str, Shop] = {}
_opening = threading.Lock()


class Shop:
    """What can be bought, and how it is found."""

    def __init__(self, name: str, products: Iterable[Product]) -> None:
        self.name = name
        self._products = tuple(products)
        self._by_asin = {product.asin: product for product in self._products}
        self._index = Index(product.search_text for product in self._products)

    def __len__(self) -> int:
        return len(self._products)

    def __contains__(self, asin: str) -> bool:
        return asin in self._by_asin

    def __getitem__(self, asin: str) -> Product:
        return self._by_asin[asin]

    def search(self, words: str) -> Sequence[Product]:
        """The products that the words find, best first."""
        return [self._products[position] for position in self._index.search(words, FOUND)]


def open_shop(name: str) -> Shop:
    """The shop of this name; slow the first time.

    `official` has the 1,000 products of the small official set, `official/all` all of them, `generated/1000/7` a
    thousand that are drawn with seed 7.
    """
    with _opening:
        if name not in _shops:
            shop = Shop(name, _products(name))
            while len(_shops) >= _KEPT:
                del _shops[next(iter(_shops))]
            _shops[name] = shop
        return _shops[name]


def opened(name: str) -> Shop | None:
    """The shop, if it is open."""
    return _shops.get(name)


def _products(name: str) -> Iterable[Product]:
    if name in FILES:
        return [listed.product for listed in read_products(name)]
    kind, _, numbers = name.partition("/")
    size, _, seed = numbers.partition("/")
    if kind == "generated" and size.isdecimal() and seed.isdecimal() and 1 <= int(size) <= LARGEST:
        return catalogue(int(size), int(seed))
    raise DataError(
        f"there is no shop {name!r:.80}; there are {', '.join(FILES)} and generated/PRODUCTS/SEED, "
        f"with up to {LARGEST} products"
    )
