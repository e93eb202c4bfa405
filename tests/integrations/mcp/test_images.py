"""Images in results of MCP servers: how many of them are decoded, and how long they are kept."""

import base64
import gc
import io

import pytest

pytest.importorskip("mcp", reason="MCP is not installed: pip install 'agentfly-rl[mcp]'")
PIL_Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed: pip install 'agentfly-rl[vision]'")

from mcp import types as mcp_types  # noqa: E402

from agentfly.integrations.mcp.tools import MAX_IMAGES, to_observation  # noqa: E402
from agentfly.types import Image  # noqa: E402
from agentfly.vision import images as image_module  # noqa: E402


def image_block(*size: int) -> mcp_types.ImageContent:
    file = io.BytesIO()
    PIL_Image.new("1", size).save(file, format="PNG")
    return mcp_types.ImageContent(type="image", data=base64.b64encode(file.getvalue()).decode(), mime_type="image/png")


def test_only_the_first_of_many_large_images_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[Image] = []
    normalize_pixels = image_module._normalize_pixels

    def count(image: Image) -> Image:
        decoded.append(image)
        return normalize_pixels(image)

    monkeypatch.setattr(image_module, "_normalize_pixels", count)
    large = image_block(8000, 8000)
    observation = to_observation(mcp_types.CallToolResult(content=[large] * 40), [])
    assert len(observation["image"]) == len(decoded) == 1
    assert observation["observation"].count("a result may have 32 images, of 64,000,000 pixels together") == 39
    many = to_observation(mcp_types.CallToolResult(content=[image_block(2, 2)] * (MAX_IMAGES + 3)), [])
    assert len(many["image"]) == MAX_IMAGES
    assert many["observation"].count("not be shown") == 3


def test_images_end_with_their_chain() -> None:
    observation = to_observation(mcp_types.CallToolResult(content=[image_block(3, 5)]), [])
    (image,) = observation["image"]
    url = image.url
    del observation, image
    gc.collect()
    assert not [kept for kept in gc.get_objects() if isinstance(kept, Image) and kept.url == url]
    assert Image(url) not in image_module._NORMALIZED
