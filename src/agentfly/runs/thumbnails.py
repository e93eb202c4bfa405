"""Images as people see them: thumbnails in HTML, a label elsewhere."""

from __future__ import annotations

import hashlib
import io
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

from agentfly.errors import DataError
from agentfly.types import Image
from agentfly.vision.images import open_image

MAX_EDGE = 240
"""Longest edge of a thumbnail in HTML, in pixels."""


def describe_image(image: Image) -> str:
    """A label: the size in pixels and the start of a hash of the content, or the address."""
    if not image.url.startswith("data:"):
        return f"[image {image.url:.100}]"
    name = hashlib.sha256(image.url.encode()).hexdigest()[:8]
    pixels = try_open_image(image)
    return f"[image {name}]" if pixels is None else f"[image {pixels.width}x{pixels.height} {name}]"


@lru_cache(maxsize=32)
def try_open_image(image: Image) -> Any:
    """The pixels of an image; None if they cannot be decoded here."""
    if find_spec("PIL") is None or not image.url.startswith("data:"):
        return None
    try:
        return open_image(image)
    except DataError:
        return None


def make_thumbnail(image: Image) -> Image | None:
    """The image with at most `MAX_EDGE` pixels per side, as JPEG unless PNG is smaller; None if it is not decodable."""
    pixels = try_open_image(image)
    if pixels is None:
        return None
    small = pixels.copy()
    small.thumbnail((MAX_EDGE, MAX_EDGE))
    encoded = []
    for settings in ({"format": "PNG", "optimize": True}, {"format": "JPEG", "quality": 80}):
        buffer = io.BytesIO()
        small.save(buffer, **settings)
        encoded.append(buffer.getvalue())
    return Image.of(min(encoded, key=len))
