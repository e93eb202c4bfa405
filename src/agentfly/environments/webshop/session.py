"""One customer in a shop: where they are, what they chose, and what they bought.

A session holds a few references and small sets, so there may be as many as one likes; the shop is shared.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from agentfly.environments.webshop import pages
from agentfly.environments.webshop.goal import Goal
from agentfly.environments.webshop.pages import Kind, Part
from agentfly.environments.webshop.product import Product
from agentfly.environments.webshop.score import Score, score
from agentfly.environments.webshop.shop import Shop

_ACTION = re.compile(r"(search|click)\[(.+)\]", re.DOTALL)


class Session:
    """Searching, clicking and buying, by WebShop's rules."""

    def __init__(self, shop: Shop, goal: Goal, window: int = pages.WINDOW) -> None:
        self.shop, self.goal, self.window = shop, goal, window
        self.score: Score | None = None
        """Of the purchase; None: nothing was bought yet."""
        self._begin()

    def _begin(self) -> None:
        self.keywords: str | None = None
        self.found: Sequence[Product] = ()
        self.number = 1
        """The page of results, from 1."""
        self.seen: set[str] = set()
        self._leave()

    def _leave(self) -> None:
        """Back from a product to where it was found."""
        self.product: Product | None = None
        self.options: dict[str, str] = {}
        self.about: str | None = None
        """The part of the product's page that is open; None: the page itself."""

    @property
    def page(self) -> list[Part]:
        """What the customer sees."""
        wish = self.goal.instruction
        if self.score is not None:
            return pages.done_page(self.score.reward)
        if self.product is not None and self.about:
            return pages.sub_page(wish, self.product, self.about)
        if self.product is not None:
            return pages.item_page(wish, self.product, self.options.values())
        if self.keywords is not None:
            return pages.results_page(wish, self.found, self.number, self.seen, self.window)
        return pages.search_page(wish)

    @property
    def clickable(self) -> dict[str, Part]:
        """What can be clicked here; the search button cannot, since searching needs words."""
        there = pages.clickable(self.page)
        there.pop(pages.SEARCH.lower(), None)
        return there

    def act(self, action: str) -> bool:
        """Do `search[words]` or `click[label]`; whether that is possible here. What is not changes nothing."""
        read = _ACTION.fullmatch(action)
        if read is None:
            return False
        return self.search(read[2]) if read[1] == "search" else self.click(read[2])

    def search(self, words: str) -> bool:
        """Search, from whatever page."""
        if self.score is not None or not words:
            return False
        self._show(words.lower(), 1)
        return True

    def _show(self, words: str, number: int) -> None:
        if words != self.keywords:
            self.found = self.shop.search(words)
        self.keywords, self.number = words, number
        self._leave()

    def click(self, label: str) -> bool:
        """Click what bears this label."""
        part = self.clickable.get(label.lower().strip())
        if part is None:
            return False
        if part.kind is Kind.LINK:
            self.product = self.shop[part.text]
            self.seen.add(part.text)
        elif part.kind is Kind.OPTION:
            self.options[part.option] = part.text
        else:
            self._press(part.text)
        return True

    def _press(self, button: str) -> None:
        if button == pages.BACK:
            self._begin()
        elif button == pages.BUY and self.product is not None:
            self.score = score(self.product, self.goal, self.options)
        elif button == pages.NEXT:
            self._show(self.keywords or "", self.number + 1)
        elif button != pages.PREVIOUS:
            self.about = button
        elif self.about is not None:
            self.about = None
        elif self.product is not None:
            self._show(self.keywords or "", self.number)
        else:
            self._show(self.keywords or "", self.number - 1)
