"""One customer's session in a shared shop: the current page, the chosen options, the purchase."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from agentfly.environments.webshop import pages
from agentfly.environments.webshop.pages import PagePart, PartType, buttons, text
from agentfly.environments.webshop.product import ShopGoal, ShopProduct, ShopScore, score_purchase
from agentfly.environments.webshop.shop import Shop

_ACTION = re.compile(r"(search|click)\[(.+)\]", re.DOTALL)


class ShopSession:
    """Searching, clicking and buying by WebShop's rules."""

    def __init__(self, shop: Shop, goal: ShopGoal, window: int = pages.WINDOW) -> None:
        self.shop = shop
        self.goal = goal
        self.window = window
        self.score: ShopScore | None = None
        """Score of the purchase. None before it."""
        self._reset()

    def _reset(self) -> None:
        """Go to the start page."""
        self.keywords: str | None = None
        self.found: Sequence[ShopProduct] = ()
        self.number = 1
        """Page of results, from 1."""
        self.seen: set[str] = set()
        self._leave_product()

    def _leave_product(self) -> None:
        self.product: ShopProduct | None = None
        self.options: dict[str, str] = {}
        self.about: str | None = None
        """The open sub-page of the product. None for its main page."""

    def snapshot(self) -> dict[str, Any]:
        """The session as plain data."""
        return {
            "keywords": self.keywords,
            "number": self.number,
            "seen": sorted(self.seen),
            "product": None if self.product is None else self.product.asin,
            "options": dict(self.options),
            "about": self.about,
            "score": None if self.score is None else asdict(self.score),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a snapshot of a session with the same shop and goal."""
        self.keywords = state["keywords"]
        self.found = () if self.keywords is None else self.shop.search(self.keywords)
        self.number = state["number"]
        self.seen = set(state["seen"])
        self.product = None if state["product"] is None else self.shop.products[state["product"]]
        self.options = dict(state["options"])
        self.about = state["about"]
        self.score = None if state["score"] is None else ShopScore(**state["score"])

    @property
    def page(self) -> list[PagePart]:
        """The current page."""
        instruction = [text(pages.INSTRUCTION_LABEL), text(self.goal.instruction)]
        if self.score is not None:
            thanks = PagePart(PartType.HEADING, "Thank you for shopping with us!")
            return [thanks, text("Your score (min 0.0, max 1.0)"), text(str(self.score.reward))]
        if self.product is None and self.keywords is None:
            return [PagePart(PartType.HEADING, "WebShop"), *instruction, *buttons(pages.SEARCH)]

        page = [*instruction, *buttons(pages.BACK)]
        product = self.product
        if product is None:
            page.append(text(f"Page {self.number} (Total results: {len(self.found)})"))
            # NEXT is always there, as in WebShop.
            page += buttons(pages.PREVIOUS, pages.NEXT) if self.number > 1 else buttons(pages.NEXT)
            for listed in self.listing:
                link = PagePart(PartType.LINK, listed.asin, clicked=listed.asin in self.seen)
                page += [link, text(listed.title), text(listed.price_tag)]
            return page

        page += buttons(pages.PREVIOUS)
        if self.about is not None:
            sub_pages = {pages.DESCRIPTION: (product.description,), pages.FEATURES: product.features, pages.REVIEWS: ()}
            lines = sub_pages[self.about]
            paragraphs = filter(str.strip, lines) if any(lines) else [f"No {self.about}"]
            return page + [text(line) for line in paragraphs]
        for name, values in product.options.items():
            page.append(PagePart(PartType.HEADING, name))
            page += [PagePart(PartType.OPTION, value, name, value in self.options.values()) for value in values]
        page += [PagePart(PartType.HEADING, product.title), text(f"Price: {product.price_tag}"), text("Rating: N.A.")]
        return page + buttons(pages.DESCRIPTION, pages.FEATURES, pages.REVIEWS, pages.BUY)

    @property
    def listing(self) -> Sequence[ShopProduct]:
        """The products on the current page of results."""
        return self.found[(self.number - 1) * self.window : self.number * self.window]

    @property
    def clickable(self) -> dict[str, PagePart]:
        """Clickable parts by lowercase label: buttons, links, options; not the search button, which needs keywords."""
        order = [PartType.BUTTON, PartType.LINK, PartType.OPTION]
        clickable_parts = sorted(
            (page_part for page_part in self.page if page_part.kind in order),
            key=lambda page_part: order.index(page_part.kind),
        )
        by_label = {page_part.text.lower().strip(): page_part for page_part in clickable_parts}
        by_label.pop(pages.SEARCH.lower(), None)
        return by_label

    def act(self, action: str) -> bool:
        """Carry out `search[keywords]` or `click[label]`. Returns False, without effect, if it is not possible here."""
        match = _ACTION.fullmatch(action)
        if match is None:
            return False
        return self.search(match[2]) if match[1] == "search" else self.click(match[2])

    def search(self, keywords: str) -> bool:
        """Search from any page but the last one. Returns False if that is not possible."""
        if self.score is not None or not keywords:
            return False
        self._show_results(keywords.lower(), 1)
        return True

    def _show_results(self, keywords: str, number: int) -> None:
        if keywords != self.keywords:
            self.found = self.shop.search(keywords)
        self.keywords = keywords
        self.number = number
        self._leave_product()

    def click(self, label: str) -> bool:
        """Click the part with this label. Returns False if there is none."""
        clicked = self.clickable.get(label.lower().strip())
        if clicked is None:
            return False
        if clicked.kind is PartType.LINK:
            self.product = self.shop.products[clicked.text]
            self.seen.add(clicked.text)
        elif clicked.kind is PartType.OPTION:
            self.options[clicked.option] = clicked.text
        elif clicked.text == pages.BACK:
            self._reset()
        elif clicked.text == pages.BUY and self.product is not None:
            self.score = score_purchase(self.product, self.goal, self.options)
        elif clicked.text == pages.NEXT:
            self._show_results(self.keywords or "", self.number + 1)
        elif clicked.text != pages.PREVIOUS:
            self.about = clicked.text
        elif self.about is not None:
            self.about = None
        elif self.product is not None:
            self._show_results(self.keywords or "", self.number)
        else:
            self._show_results(self.keywords or "", self.number - 1)
        return True
