"""The web shop as an environment: search, browse, choose options, buy. Instances share the shop, not the session.

For vision models the pages are HTML, rendered by a browser, as screenshots.
"""

from __future__ import annotations

import importlib
from dataclasses import asdict
from typing import Any, ClassVar, Literal

from agentfly import threads
from agentfly.environment import Environment, Pool
from agentfly.environments.bm25 import import_bm25s
from agentfly.environments.browser import BrowserEnvironment, Coordinate
from agentfly.environments.webshop import pages
from agentfly.environments.webshop.product import LIMIT, ShopGoal, extract_nouns
from agentfly.environments.webshop.session import ShopSession
from agentfly.environments.webshop.shop import find_cached_shop, open_shop
from agentfly.environments.webshop.tasks import draw_tasks
from agentfly.errors import ConfigError, DataError, require_extra
from agentfly.scoring import reward
from agentfly.tooling import tool
from agentfly.types import Image, Task, ToolCall

_VIEWS = {"text": pages.render_text, "rich": pages.render_rich, "brief": pages.render_brief, "html": pages.render_html}
_CLICKABLE = "document.elementFromPoint({x}, {y})?.closest('button, a, label')?.textContent ?? ''"


class WebShop(Environment):
    """A shop with a search engine and pages to click through; buying ends the chain and determines its score."""

    scored_by = "webshop_reward"
    view: ClassVar[Literal["text", "rich", "brief", "html"]] = "text"
    """Page format, set on a subclass: WebShop's plain text, its text with marked buttons, plain text without repeated
    parts, or HTML."""

    window: ClassVar[int] = pages.WINDOW
    """Products per page of results. Fewer make chains shorter."""
    expert_explores: ClassVar[bool] = False
    """Whether the expert uses only the instruction and the pages, as a model must; otherwise it knows the product."""

    draw_tasks = staticmethod(draw_tasks)

    async def start(self) -> None:
        """Validate the view, report missing packages and load what is slow to load."""
        if self.view not in _VIEWS:
            raise ConfigError(f"{type(self).__name__}.view is {self.view!r:.40}; there are {', '.join(_VIEWS)}")
        await threads.call(_load_packages)

    async def reset(self, task: Task) -> None:
        """Start a session with the goal in the column `goal`, in the shop named by the column `shop`."""
        goal = ShopGoal.from_json(task.columns.get("goal"))
        name = task.columns.get("shop")
        if not isinstance(name, str):
            raise DataError(f"the column `shop` must name a shop, such as 'official'; it is {name!r:.60}")
        shop = find_cached_shop(name) or await threads.call(open_shop, name)
        if goal.asin not in shop.products:
            raise DataError(f"the goal was made from product {goal.asin!r:.40}, which the shop {name!r} does not have")
        self.session = ShopSession(shop, goal, self.window)

    @property
    def score(self) -> dict[str, float] | None:
        """`reward` of the purchase and its parts. None before a purchase."""
        return None if self.session.score is None else asdict(self.session.score)

    def page(self) -> str:
        """The current page in the configured format."""
        return _VIEWS[self.view](self.session.page)

    @tool(max_length=20_000)
    async def search(self, keywords: str) -> dict[str, Any]:
        """Search the shop. Shows the first page of the products found, each with its number, title and price.

        Args:
            keywords: What to look for.
        """
        return await self._respond("" if self.session.search(keywords) else "Give some words to search for.")

    @tool(max_length=20_000)
    async def click(self, label: str) -> dict[str, Any]:
        """Click something on the page: a product's number, an option, or a button such as Back to Search, Next >,
        < Prev, Description, Features, Reviews or Buy Now. Buy Now ends the shopping.

        Args:
            label: What to click, in the words that stand on the page.
        """
        if self.session.click(label):
            return await self._respond()
        labels = ", ".join(page_part.text for page_part in self.session.clickable.values()) or "nothing; search instead"
        return await self._respond(f"There is no {label!r:.80} to click here. There is: {labels}.")

    async def snapshot(self) -> dict[str, Any]:
        """The session: current page, chosen options, purchase."""
        return self.session.snapshot()

    async def restore(self, state: dict[str, Any]) -> None:
        """Continue the session as it was."""
        self.session.restore(state)

    async def _respond(self, error: str = "") -> dict[str, Any]:
        page = f"{error}\n\n{self.page()}" if error else self.page()
        return {"observation": page, "valid": not error, "ends_chain": self.score is not None}

    def expert(self) -> ToolCall | str:
        """Find the product, choose its options, and buy it."""
        choose = next_exploring_action if self.expert_explores else next_informed_action
        action = choose(self.session)
        if action is None:
            return "Done." if self.score else "I cannot find it."
        name, value = action
        return ToolCall(name, {"keywords" if name == "search" else "label": value})


def _load_packages() -> None:
    import_bm25s("the web shop", "webshop")
    with require_extra("the web shop", "webshop"):
        for package in ("rapidfuzz", "Stemmer"):
            importlib.import_module(package)
    extract_nouns("loads the lexicon")


# Two scripted experts. Both are stateless: the next action depends on the session only. An action is `search` or
# `click` with its argument. None means that the session is over or nothing is left to try.
Action = tuple[str, str]


def next_informed_action(session: ShopSession) -> Action | None:
    """Search for the title of the product, then choose the options and buy."""
    goal = session.goal
    if session.score is not None:
        return None
    if session.product is not None:
        is_elsewhere = session.about or session.product.asin != goal.asin
        return "click", pages.PREVIOUS if is_elsewhere else _next_option(session)
    if session.keywords is None:
        return "search", goal.name
    if goal.asin.lower() in session.clickable:
        return "click", goal.asin
    if session.number * session.window < len(session.found):
        return "click", pages.NEXT
    queries = [query.lower() for query in (goal.name, " ".join([goal.name, *goal.options]), goal.instruction)]
    tried = queries.index(session.keywords) + 1 if session.keywords in queries else 0
    return ("search", queries[tried]) if tried < len(queries) else None


def next_exploring_action(session: ShopSession) -> Action | None:
    """Search with the words of the instruction and buy the first product on the page within the price limit."""
    if session.score is not None:
        return None
    if session.product is not None:
        return "click", pages.PREVIOUS if session.about else _next_option(session)
    if session.keywords is None:
        return "search", session.goal.instruction.partition(LIMIT)[0]
    products = session.listing
    affordable = (product.asin for product in products if product.price < session.goal.price_upper)
    return ("click", next(affordable, products[0].asin)) if products else None


def _next_option(session: ShopSession) -> str:
    """The next wanted option that is available and not chosen yet; the buy button if there is none."""
    chosen = session.options.values()
    missing = (
        option for option in session.goal.options if option not in chosen and option.strip() in session.clickable
    )
    return next(missing, pages.BUY)


@reward
def webshop_reward(env: WebShop) -> dict[str, Any]:
    """Score of the purchase, 0 to 1. 0 without a purchase.

    Metrics: `success` (the score is 1), `bought`, and the parts of the score: `r_type`, `r_attributes`, `r_options`,
    `r_price`.
    """
    score = env.score
    if score is None:
        return {"reward": 0.0, "success": 0.0, "bought": 0.0}
    components = {f"r_{name}": value for name, value in score.items() if name != "reward"}
    return {"reward": score["reward"], "success": float(score["reward"] == 1.0), "bought": 1.0, **components}


class VisualWebShop(BrowserEnvironment, WebShop):
    """A shop whose pages are screenshots; elements are clicked by label or by position."""

    pool = Pool(memory=400 << 20, start_timeout=300.0, max_instances=16)
    view = "html"
    window: ClassVar[int] = 5
    """Products per page of results, so that most pages fit a screenshot."""

    @tool
    async def click_at(self, x: Coordinate, y: Coordinate) -> dict[str, Any]:
        """Click on a point of the screenshot. Buy Now ends the shopping.

        Args:
            x: 0 (left edge) to 1000 (right edge).
            y: 0 (upper edge) to 1000 (lower edge).
        """
        await self._show()
        left, top = self.to_pixels(x, y)
        label = str(await self.browser.evaluate(_CLICKABLE.format(x=left, y=top)))
        clicked = bool(label) and self.session.click(label)
        return await self._respond("" if clicked else "There is nothing to click at this point.")

    async def _respond(self, error: str = "") -> dict[str, Any]:
        result = await super()._respond(error)
        await self._show()
        return {**result, "observation": error, "image": Image.of(await self.browser.screenshot())}

    async def _show(self) -> None:
        """Load the current page into the browser."""
        page = self.page().encode()
        await self.browser.open("/shop.html", lambda path: page if path == "/shop.html" else None)
