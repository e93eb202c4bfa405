"""A web shop: search, look, choose options, buy. Every chain is a customer of its own in a shop that all share."""

from __future__ import annotations

import importlib
from dataclasses import asdict
from typing import Any, ClassVar, Literal

from agentfly import threads
from agentfly.environment import Environment
from agentfly.environments.webshop import expert, generated, pages
from agentfly.environments.webshop.goal import Goal
from agentfly.environments.webshop.html import page_html
from agentfly.environments.webshop.nouns import nouns
from agentfly.environments.webshop.session import Session
from agentfly.environments.webshop.shop import open_shop, opened
from agentfly.errors import ConfigError, DataError
from agentfly.extras import needed
from agentfly.tooling import tool
from agentfly.types import Task, ToolCall

_VIEWS = {"text": pages.plain, "rich": pages.rich, "brief": pages.brief, "html": page_html}


class WebShop(Environment):
    """A shop to search in, with pages to click through; buying ends the chain and gives it its score."""

    scored_by = "webshop_reward"
    view: ClassVar[Literal["text", "rich", "brief", "html"]] = "text"
    """How pages are shown: WebShop's plain text, its text with buttons marked, plain text without what the customer
    knows already, or HTML. Set it on a subclass."""

    window: ClassVar[int] = pages.WINDOW
    """Products on a page of results. Fewer make chains shorter."""
    expert_explores: ClassVar[bool] = False
    """Whether the expert has only the wish and what the pages show, as a model has; else it knows the product."""

    @classmethod
    def draw_tasks(
        cls, split: str = "train", count: int = 100, *, seed: int = 0, products: int = 1000
    ) -> list[dict[str, Any]]:
        """Wishes of customers of a generated shop with so many `products`; those of the same seed share the shop."""
        return generated.draw_tasks(split, count, seed, products)

    async def start(self) -> None:
        """Fail now where a package is missing or there is no such view; and load what is slow to load."""
        if self.view not in _VIEWS:
            raise ConfigError(f"{type(self).__name__}.view is {self.view!r:.40}; there are {', '.join(_VIEWS)}")
        await threads.call(_load)

    async def reset(self, task: Task) -> None:
        """A customer with the wish of the column `goal`, in the shop of the column `shop`."""
        goal, name = Goal.of(task.columns.get("goal")), task.columns.get("shop")
        if not isinstance(name, str):
            raise DataError(f"the column `shop` names the shop, such as 'official'; it is {name!r:.60}")
        shop = opened(name) or await threads.call(open_shop, name)
        if goal.asin not in shop:
            raise DataError(f"the goal was made of product {goal.asin!r:.40}, which the shop {name!r} does not have")
        self.session = Session(shop, goal, self.window)

    @property
    def score(self) -> dict[str, float] | None:
        """Of what was bought: `reward`, and the parts it is made of; None: nothing was."""
        return None if self.session.score is None else asdict(self.session.score)

    def page(self) -> str:
        """What the customer sees."""
        return _VIEWS[self.view](self.session.page)

    @tool(max_length=20_000)
    async def search(self, keywords: str) -> dict[str, Any]:
        """Search the shop. Shows the first page of the products found, each with its number, title and price.

        Args:
            keywords: What to look for.
        """
        return self._shown("" if self.session.search(keywords) else "Give some words to search for.")

    @tool(max_length=20_000)
    async def click(self, label: str) -> dict[str, Any]:
        """Click something on the page: a product's number, an option, or a button such as Back to Search, Next >,
        < Prev, Description, Features, Reviews or Buy Now. Buy Now ends the shopping.

        Args:
            label: What to click, in the words that stand on the page.
        """
        if self.session.click(label):
            return self._shown("")
        there = ", ".join(part.text for part in self.session.clickable.values()) or "nothing; search instead"
        return self._shown(f"There is no {label!r:.80} to click here. There is: {there}.")

    def _shown(self, complaint: str) -> dict[str, Any]:
        page = f"{complaint}\n\n{self.page()}" if complaint else self.page()
        return {"observation": page, "valid": not complaint, "ends_chain": self.score is not None}

    def expert(self) -> ToolCall | str:
        """Find the product, choose its options, and buy it."""
        action = (expert.exploring if self.expert_explores else expert.knowing)(self.session)
        if action is None:
            return "Done." if self.score else "I cannot find it."
        name, value = action
        return ToolCall(name, {"keywords" if name == "search" else "label": value})


def _load() -> None:
    with needed("the web shop", "webshop"):
        for package in ("bm25s", "rapidfuzz", "Stemmer"):
            importlib.import_module(package)
    nouns("a warm lexicon")
