"""Two scripted experts: one knows the product the goal was made from, the other has only the instruction and the pages.

Both are stateless: the next action depends on the session only. An action is `search` or `click` with its argument;
None means that the session is over or nothing is left to try.
"""

from __future__ import annotations

from agentfly.environments.webshop import pages
from agentfly.environments.webshop.goal import LIMIT
from agentfly.environments.webshop.session import ShopSession

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
    queries = [each.lower() for each in (goal.name, " ".join([goal.name, *goal.options]), goal.instruction)]
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
    listed = session.found[(session.number - 1) * session.window :][: session.window]
    affordable = (product.asin for product in listed if product.price < session.goal.price_upper)
    return ("click", next(affordable, listed[0].asin)) if listed else None


def _next_option(session: ShopSession) -> str:
    """The next wanted option that is available and not chosen yet; the buy button if there is none."""
    chosen = session.options.values()
    missing = (each for each in session.goal.options if each not in chosen and each.strip() in session.clickable)
    return next(missing, pages.BUY)
