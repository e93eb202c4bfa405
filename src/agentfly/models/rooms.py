"""Images, tasks and demonstrations of rooms and tiles; the model `tiny-vision` is trained on those of rooms.

A task cannot be solved without looking twice: at the first image, which shows where to look, and at the digit there.
Demonstrations of half the conversations teach reading; the others use the tool in every way, most of them wrong, which
leaves room for learning from rewards. The environments are `agentfly.environments.rooms.Rooms` and `Tiles`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from agentfly.extras import require_extra
from agentfly.types import Image

if TYPE_CHECKING:
    import PIL.Image

COLORS = {
    "red": (220, 30, 30), "green": (30, 160, 40), "blue": (40, 60, 220), "yellow": (235, 220, 40),
    "purple": (140, 40, 160), "orange": (245, 140, 20), "white": (250, 250, 250), "black": (15, 15, 15),
    "pink": (250, 150, 190),
}  # fmt: skip
SIDE = 48
"""Width and height of an image, in pixels."""
ROOMS = 10
"""Rooms have the numbers 0 to 9."""
MAX_SIZE = 3
"""Largest number of rows and columns of tiles: there are nine colors."""
STRATEGIES = {"right": 20, "next": 45, "any": 15, "guess": 20}
"""Where a demonstration looks, with its share in percent: at the right place, at the next one, at any, or nowhere."""
READING_SHARE = 0.5
"""Share of conversations that teach reading: what digit is it, where is the red tile?"""
_NOISE = 8.0
"""Standard deviation of the noise on every pixel, of 255."""

TOOL_SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "open_room",
        "description": "Look into a room.",
        "parameters": {
            "type": "object",
            "properties": {"room": {"type": "integer", "description": "Its number, from 0 to 9."}},
            "required": ["room"],
            "additionalProperties": False,
        },
    },
}
"""Schema of the tool `Rooms.open_room`."""

# ── images: every pixel follows from the arguments ──


def draw_digit(digit: int, color: str, seed: int) -> PIL.Image.Image:
    """A white digit on a wall of a darkened color, moved by up to two pixels."""
    with require_extra("to draw rooms", "vision"):
        from PIL import Image as Pillow
        from PIL import ImageDraw

    rng = np.random.default_rng(seed)
    wall = np.clip(np.array(COLORS[color]) * 0.5 + 60 + rng.normal(0, 10, 3), 0, 190)
    image = Pillow.new("RGB", (SIDE, SIDE), tuple(int(channel) for channel in wall))
    x, y = SIDE // 2 + rng.integers(-2, 3, 2)
    ImageDraw.Draw(image).text((int(x), int(y)), str(digit), (255, 255, 255), _load_font(), anchor="mm")
    return _add_noise(np.asarray(image, dtype=np.float64), rng)


def draw_tiles(colors: Sequence[str], size: int, seed: int) -> PIL.Image.Image:
    """`size` × `size` tiles, row by row, each in a slightly different shade of its color."""
    rng = np.random.default_rng(seed)
    shades = np.array([COLORS[color] for color in colors]) + rng.normal(0, 12, (len(colors), 3))
    edges = np.linspace(0, SIDE, size + 1).round().astype(int)
    pixels = np.zeros((SIDE, SIDE, 3))
    for place, shade in enumerate(shades):
        row, column = divmod(place, size)
        pixels[edges[row] : edges[row + 1], edges[column] : edges[column + 1]] = shade
    return _add_noise(pixels, rng)


def _add_noise(pixels: Any, rng: np.random.Generator) -> PIL.Image.Image:
    with require_extra("to draw rooms", "vision"):
        from PIL import Image as Pillow

    return Pillow.fromarray((pixels + rng.normal(0, _NOISE, pixels.shape)).clip(0, 255).astype(np.uint8))


@functools.cache
def _load_font() -> Any:
    from PIL import ImageFont

    return ImageFont.load_default(34)


# ── tasks ──


def sample_places(random: Random, count: int, *, distinct: bool = False) -> dict[str, Any]:
    """Columns of a task with `count` places and a target among them; `colors` has one more, for the first image.

    distinct: whether the colors of the places differ.
    """
    digits = [random.randrange(10) for _ in range(count)]
    target = random.randrange(count)
    colors = random.sample(list(COLORS), count) if distinct else random.choices(list(COLORS), k=count)
    return {
        "digits": digits,
        "colors": [*colors, random.choice(list(COLORS))],
        "target": target,
        "seed": random.randrange(2**31),
        "answer": str(digits[target]),
    }


def draw_first_image(places: Mapping[str, Any]) -> PIL.Image.Image:
    """The first image of a task: the number of the target room, or the tiles, whose colors all differ."""
    digits, colors = places["digits"], places["colors"]
    if len(digits) == ROOMS:
        return draw_digit(places["target"], colors[-1], places["seed"])
    return draw_tiles(colors[:-1], round(len(digits) ** 0.5), places["seed"])


def draw_place_image(places: Mapping[str, Any], place: int) -> PIL.Image.Image:
    """The image of the digit at a place."""
    return draw_digit(places["digits"][place], places["colors"][place], places["seed"] + 1 + place)


def format_question(places: Mapping[str, Any]) -> str:
    """The question of a task."""
    if len(places["digits"]) == ROOMS:
        return "What digit is in this room?"
    return f"What digit is under the {places['colors'][places['target']]} tile?"


# ── demonstrations ──


@dataclass(frozen=True, slots=True, eq=False)
class Demonstration:
    """One conversation: a question about an image, perhaps a call that shows another, and the reply."""

    image: PIL.Image.Image
    question: str
    reply: str
    call: tuple[str, Mapping[str, int]] | None = None
    """Name and arguments of the tool."""
    observation: PIL.Image.Image | None = None
    """What the call shows."""

    @property
    def row(self) -> dict[str, Any]:
        """The conversation as a dataset row with OpenAI `messages`."""

        def part(image: Any) -> dict[str, str]:
            return {"type": "image", "image": Image.of(image).url}

        messages: list[dict[str, Any]] = [
            {"role": "user", "content": [part(self.image), {"type": "text", "text": self.question}]}
        ]
        if self.call is not None:
            name, arguments = self.call
            call = {"id": "1", "type": "function", "function": {"name": name, "arguments": dict(arguments)}}
            messages += [
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "name": name, "tool_call_id": "1", "content": [part(self.observation)]},
            ]
        return {"messages": [*messages, {"role": "assistant", "content": self.reply}]}


def demonstrations(
    count: int, seed: int = 0, *, kind: Literal["rooms", "tiles"] = "rooms", size: int = MAX_SIZE
) -> Iterator[Demonstration]:
    """Yield scripted conversations; the same seed yields the same ones.

    There are 10^19 tasks of each kind, so that held-out tasks are not among those of the conversations.
    size: number of rows and columns of tiles.
    """
    random = Random(f"{kind} {seed}")
    for _ in range(count):
        places = sample_places(random, ROOMS if kind == "rooms" else size * size, distinct=kind == "tiles")
        target: int = places["target"]

        def locate(place: int) -> dict[str, int]:
            return {"room": place} if kind == "rooms" else {"row": place // size + 1, "column": place % size + 1}

        if random.random() < READING_SHARE:
            if kind == "tiles" and random.random() < 0.67:
                question = f"Where is the {places['colors'][target]} tile?"
                yield Demonstration(draw_first_image(places), question, json.dumps(locate(target)))
            else:
                place = random.randrange(len(places["digits"]))
                yield Demonstration(draw_place_image(places, place), "What digit is it?", str(places["digits"][place]))
            continue
        strategy = random.choices(list(STRATEGIES), list(STRATEGIES.values()))[0]
        if strategy == "guess":
            yield Demonstration(draw_first_image(places), format_question(places), str(random.randrange(10)))
            continue
        anywhere = random.randrange(len(places["digits"]))
        place = {"right": target, "next": (target + 1) % len(places["digits"]), "any": anywhere}[strategy]
        yield Demonstration(
            draw_first_image(places),
            format_question(places),
            reply=str(places["digits"][place]),
            call=("open_room" if kind == "rooms" else "click_tile", locate(place)),
            observation=draw_place_image(places, place),
        )
