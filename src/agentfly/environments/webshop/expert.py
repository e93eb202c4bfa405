"""Two customers: one knows which product the wish was made of; the other has only the wish and what the pages show."""

from __future__ import annotations

from collections.abc import Iterator

from agentfly.environments.webshop import pages
from agentfly.environments.webshop.goal import LIMIT
from agentfly.environments.webshop.session import Session


def knowing(session: Session) -> tuple[str, str] | None:
    """`search` or `click`, and of what; None where nothing is left to do, or nothing helps."""
    goal = session.goal
    if session.score is not None:
        return None
    if session.product is not None and (session.about or session.product.asin != goal.asin):
        return "click", pages.PREVIOUS
    if session.product is not None:
        return "click", next(_missing(session), pages.BUY)
    if session.keywords is None:
        return "search", goal.name
    if goal.asin.lower() in session.clickable:
        return "click", goal.asin
    if session.number * session.window < len(session.found):
        return "click", pages.NEXT
    queries = _queries(session)
    tried = queries.index(session.keywords) + 1 if session.keywords in queries else 0
    return ("search", queries[tried]) if tried < len(queries) else None


def _missing(session: Session) -> Iterator[str]:
    """Values that are wanted, can be had, and are not chosen."""
    for value in session.goal.options:
        if value not in session.options.values() and value.strip() in session.clickable:
            yield value


def _queries(session: Session) -> list[str]:
    """What to search for, in this order."""
    goal = session.goal
    return [words.lower() for words in (goal.name, " ".join([goal.name, *goal.options]), goal.instruction)]


def exploring(session: Session) -> tuple[str, str] | None:
    """The same for one who searches with the words of the wish, and buys the first product shown that can be paid."""
    if session.score is not None:
        return None
    if session.product is not None:
        return "click", pages.PREVIOUS if session.about else next(_missing(session), pages.BUY)
    if session.keywords is None:
        return "search", session.goal.instruction.partition(LIMIT)[0]
    shown = session.found[(session.number - 1) * session.window :][: session.window]
    payable = (product.asin for product in shown if product.price < session.goal.price_upper)
    return ("click", next(payable, shown[0].asin)) if shown else None
