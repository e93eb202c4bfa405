"""Images as people see them: half blocks in a terminal, thumbnails in HTML, a label elsewhere."""

from __future__ import annotations

import hashlib
import io
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.text import Text

from agentfly.errors import DataError
from agentfly.types import Image
from agentfly.vision.images import open_image

MAX_EDGE = 240
"""Longest edge of a thumbnail in HTML, in pixels."""
MAX_COLUMNS = 40
MAX_ROWS = 16
"""Size of an image in a terminal, in characters."""


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


# ── in a terminal ──


def has_colors(console: Console) -> bool:
    """Whether half blocks can be shown: in a terminal with at least 256 colors."""
    return console.is_terminal and not console.is_dumb_terminal and console.color_system in ("256", "truecolor")


def print_image(console: Console, image: Image) -> None:
    """Print an image as half blocks, where the terminal has the colors, and its label."""
    if has_colors(console) and try_open_image(image) is not None:
        console.print(draw_blocks(image, MAX_COLUMNS, MAX_ROWS))
    console.print(Text(describe_image(image), "dim"), soft_wrap=True, highlight=False)


@lru_cache(maxsize=64)
def draw_blocks(image: Image, max_columns: int, max_rows: int) -> Text:
    """An image of half blocks: each character shows two pixels. Its label if it cannot be decoded."""
    pixels = try_open_image(image)
    if pixels is None:
        return Text(describe_image(image))
    # A character is twice as high as wide.
    scale = min(max_columns / pixels.width, 2 * max_rows / pixels.height)
    columns = max(round(pixels.width * scale), 1)
    rows = max(round(pixels.height * scale / 2), 1)
    data = pixels.resize((columns, 2 * rows)).tobytes()  # [2 * rows, columns, 3]

    def color(x: int, y: int) -> Color:
        at = 3 * (y * columns + x)
        return Color.from_rgb(data[at], data[at + 1], data[at + 2])

    text = Text(no_wrap=True)
    for y in range(rows):
        for x in range(columns):
            text.append("▀", Style(color=color(x, 2 * y), bgcolor=color(x, 2 * y + 1)))
        text.append("\n" if y < rows - 1 else "")
    return text
