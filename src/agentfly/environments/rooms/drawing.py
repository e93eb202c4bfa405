"""Small noisy images of digits and of colored tiles: every pixel follows from the arguments."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from agentfly.extras import require_extra

with require_extra("Rooms", "vision"):
    from PIL import Image, ImageDraw, ImageFont

COLORS = {
    "red": (220, 30, 30), "green": (30, 160, 40), "blue": (40, 60, 220), "yellow": (235, 220, 40),
    "purple": (140, 40, 160), "orange": (245, 140, 20), "white": (250, 250, 250), "black": (15, 15, 15),
    "pink": (250, 150, 190),
}  # fmt: skip
SIDE = 48
"""Width and height of an image, in pixels."""
_NOISE = 8.0
"""Standard deviation of the noise on every pixel, of 255."""


def draw_digit(digit: int, color: str, seed: int) -> Image.Image:
    """A white digit on a wall of a darkened color, moved by up to two pixels."""
    rng = np.random.default_rng(seed)
    wall = np.clip(np.array(COLORS[color]) * 0.5 + 60 + rng.normal(0, 10, 3), 0, 190)
    image = Image.new("RGB", (SIDE, SIDE), tuple(int(channel) for channel in wall))
    x, y = SIDE // 2 + rng.integers(-2, 3, 2)
    ImageDraw.Draw(image).text((int(x), int(y)), str(digit), (255, 255, 255), _load_font(), anchor="mm")
    return _add_noise(np.asarray(image, dtype=np.float64), rng)


def draw_tiles(colors: Sequence[str], size: int, seed: int) -> Image.Image:
    """`size` × `size` tiles, row by row, each in a slightly different shade of its color."""
    rng = np.random.default_rng(seed)
    shades = np.array([COLORS[color] for color in colors]) + rng.normal(0, 12, (len(colors), 3))
    edges = np.linspace(0, SIDE, size + 1).round().astype(int)
    pixels = np.zeros((SIDE, SIDE, 3))
    for place, shade in enumerate(shades):
        row, column = divmod(place, size)
        pixels[edges[row] : edges[row + 1], edges[column] : edges[column + 1]] = shade
    return _add_noise(pixels, rng)


def _add_noise(pixels: Any, rng: np.random.Generator) -> Image.Image:
    return Image.fromarray((pixels + rng.normal(0, _NOISE, pixels.shape)).clip(0, 255).astype(np.uint8))


@functools.cache
def _load_font() -> Any:
    return ImageFont.load_default(34)
