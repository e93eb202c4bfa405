"""The shop in screenshots: the expert buys through them, and a point of the page is its element."""

from __future__ import annotations

import base64
import io

import pytest
from PIL import Image as Pillow

from agentfly.agents import HFAgent
from agentfly.environments.webshop import VisualWebShop
from agentfly.rewards import webshop_reward
from agentfly.sft.demonstrations import demonstrate
from agentfly.types import Task, ToolCall
from tests.environments.browsers import needs_browser

pytestmark = needs_browser
pytest.importorskip("bm25s", reason="the extra webshop is not installed")


async def test_elements_are_clicked_by_position() -> None:
    (row,) = VisualWebShop.draw_tasks("train", 1, products=200)
    shop = VisualWebShop()
    await shop.start()
    try:
        await shop.reset(Task.of(row))
        action = shop.expert()
        assert isinstance(action, ToolCall)
        result = await shop.search(**action.arguments)
        with Pillow.open(io.BytesIO(base64.b64decode(result["image"].url.partition(",")[2]))) as image:
            assert image.size == (768, 768)
        assert shop.session.listing
        product = shop.session.listing[0].asin
        link = f"document.querySelector('[href=\"#{product}\"]').getBoundingClientRect()"
        box = await shop.browser.evaluate(f"(({{x, y, height}}) => [x + 5, y + height / 2])({link})")
        screenshot = await shop.click_at(*(round(coordinate * 1000 / 768) for coordinate in box))
        assert screenshot["valid"]
        assert shop.session.product is not None
        assert shop.session.product.asin == product
        assert screenshot["image"] != result["image"]
        assert "nothing to click" in (await shop.click_at(1000, 1000))["observation"]
    finally:
        await shop.close()


@pytest.mark.full
async def test_expert_buys_in_several_browsers() -> None:
    agent = HFAgent(
        tools=[VisualWebShop],
        reward=webshop_reward,
        template="chatml",
        backend="scripted",
        backend_config={"script": "-"},
    )
    demonstrations = await demonstrate(
        agent, VisualWebShop.draw_tasks("test", 4, products=200), threshold=1, max_turns=10
    )
    await agent.close()
    assert len(demonstrations.accepted) == 4, demonstrations.reasons
