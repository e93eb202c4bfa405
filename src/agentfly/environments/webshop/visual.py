"""The web shop as a vision model sees it: its HTML pages, rendered by a browser, as screenshots."""

from __future__ import annotations

from typing import Any, ClassVar

from agentfly.environment import Pool
from agentfly.environments.browser import BrowserEnvironment, Coordinate
from agentfly.environments.webshop.environment import WebShop
from agentfly.tooling import tool
from agentfly.types import Image

_CLICKABLE = "document.elementFromPoint({x}, {y})?.closest('button, a, label')?.textContent ?? ''"


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
