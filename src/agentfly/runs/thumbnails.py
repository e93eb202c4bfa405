"""Images as people see them: inline graphics or half blocks in a terminal, thumbnails in HTML, a label elsewhere.

Inline graphics are used where the environment variables of the terminal name a protocol; a terminal multiplexer passes
none on. A live panel is redrawn many times a second and always shows half blocks.
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, Literal

from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.text import Text

from agentfly.errors import DataError
from agentfly.images import open_image
from agentfly.types import Image

Protocol = Literal["kitty", "iterm2", "sixel", ""]
CELL = (10, 20)
"""Pixels of a character cell, assumed for graphics whose size is given in pixels."""
MAX_EDGE = 240
"""Longest edge of a thumbnail in HTML, in pixels."""
MAX_COLUMNS = 40
MAX_ROWS = 16
"""Size of an image in a terminal, in characters."""
_SIXEL_COLORS = 64


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


def find_protocol(variables: Mapping[str, str] = os.environ) -> Protocol:
    """The graphics protocol of the terminal; "" if none is known."""
    if variables.get("TMUX") or variables.get("STY"):
        return ""
    terminal, program = variables.get("TERM", ""), variables.get("TERM_PROGRAM", "").lower()
    if variables.get("KITTY_WINDOW_ID") or "kitty" in terminal or "ghostty" in (terminal, program):
        return "kitty"
    if program in ("iterm.app", "wezterm", "mintty", "vscode"):
        return "iterm2"
    if "sixel" in terminal or terminal.startswith(("foot", "mlterm", "contour")):
        return "sixel"
    return ""


def has_colors(console: Console) -> bool:
    """Whether half blocks can be shown: in a terminal with at least 256 colors."""
    return console.is_terminal and not console.is_dumb_terminal and console.color_system in ("256", "truecolor")


def print_image(console: Console, image: Image) -> None:
    """Print an image, as well as the terminal can show it, and its label."""
    label = Text(describe_image(image), "dim")
    pixels = try_open_image(image)
    if pixels is not None and has_colors(console):
        columns, rows = _fit(pixels, MAX_COLUMNS, MAX_ROWS)
        protocol = find_protocol()
        if protocol:
            console.file.write(encode_graphics(pixels, protocol, columns, rows) + "\n")
        else:
            console.print(draw_blocks(image, MAX_COLUMNS, MAX_ROWS))
    console.print(label, soft_wrap=True, highlight=False)


def _fit(pixels: Any, columns: int, rows: int) -> tuple[int, int]:
    """The largest size in characters with the proportions of the image; a character is twice as high as wide."""
    scale = min(columns / pixels.width, 2 * rows / pixels.height)
    return max(round(pixels.width * scale), 1), max(round(pixels.height * scale / 2), 1)


@lru_cache(maxsize=64)
def draw_blocks(image: Image, max_columns: int, max_rows: int) -> Text:
    """An image of half blocks: each character shows two pixels. Its label if it cannot be decoded."""
    pixels = try_open_image(image)
    if pixels is None:
        return Text(describe_image(image))
    columns, rows = _fit(pixels, max_columns, max_rows)
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


def encode_graphics(pixels: Any, protocol: Protocol, columns: int, rows: int) -> str:
    """The escape sequence that draws an image of `columns` × `rows` characters."""
    if protocol == "sixel":
        return "".join(_encode_sixel(pixels.resize((columns * CELL[0], rows * CELL[1]))))
    buffer = io.BytesIO()
    pixels.save(buffer, format="PNG")
    data = base64.b64encode(buffer.getvalue()).decode()
    if protocol == "iterm2":
        size = f"size={len(buffer.getvalue())};width={columns};height={rows};preserveAspectRatio=0"
        return f"\x1b]1337;File=inline=1;{size}:{data}\x07"
    # kitty takes at most 4096 characters at once; m=1 announces more.
    chunks = [data[at : at + 4096] for at in range(0, len(data), 4096)]
    first = f"a=T,f=100,q=2,c={columns},r={rows},"
    parts = [f"{first * (not at)}m={int(at < len(chunks) - 1)};{chunk}" for at, chunk in enumerate(chunks)]
    return "".join(f"\x1b_G{part}\x1b\\" for part in parts)


def _encode_sixel(pixels: Any) -> Iterator[str]:
    """Bands of six rows; in each, one line per color, in which a character's bits are the pixels of that color."""
    paletted = pixels.quantize(_SIXEL_COLORS)
    palette = paletted.getpalette()
    width, height = paletted.size
    data = paletted.tobytes()
    yield f'\x1bPq"1;1;{width};{height}'
    for number in range(len(palette) // 3):
        red, green, blue = (round(value / 2.55) for value in palette[3 * number : 3 * number + 3])
        yield f"#{number};2;{red};{green};{blue}"
    for top in range(0, height, 6):
        lines = [data[y * width : (y + 1) * width] for y in range(top, min(top + 6, height))]
        for number in sorted(set().union(*lines)):
            bits = (sum((line[x] == number) << row for row, line in enumerate(lines)) for x in range(width))
            yield f"#{number}" + "".join(chr(63 + each) for each in bits) + "$"
        yield "-"
    yield "\x1b\\"
