"""Images, tasks and demonstrations of rooms, on which the model `tiny-vision` is trained.

A task cannot be solved without looking twice: at the first image, which shows the number of a room, and at the digit
there. Demonstrations of half the conversations teach reading; the others use the tool in every way, most of them wrong,
which leaves room for learning from rewards. The environment is `agentfly.environments.rooms.Rooms`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np

from agentfly.errors import require_extra
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
QUESTION = "What digit is in this room?"
READING_QUESTION = "What digit is it?"
STRATEGIES = {"right": 20, "next": 45, "any": 15, "guess": 20}
"""Which room a demonstration opens, with its share in percent: the right one, the next one, any, or none."""
READING_SHARE = 0.5
"""Share of conversations that teach reading."""
NOISE = 8.0
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
TEXTS = (
    QUESTION,
    READING_QUESTION,
    "There is no such room.",
    *(f'{{"name": "open_room", "arguments": {{"room": {room}}}}}' for room in range(ROOMS)),
)
"""What the tokenizer of a model is trained on."""

# ── images: every pixel follows from the arguments ──


def draw_digit(digit: int, color: str, seed: int) -> PIL.Image.Image:
    """A white digit on a wall of a darkened color, moved by up to two pixels."""
    rng = np.random.default_rng(seed)
    image = draw_wall(SIDE, color, rng)
    x, y = SIDE // 2 + rng.integers(-2, 3, 2)
    write_digit(image, digit, (int(x), int(y)))
    return add_noise(image, rng)


def draw_wall(side: int, color: str, rng: np.random.Generator) -> PIL.Image.Image:
    """A square of a darkened color, `side` pixels wide."""
    with require_extra("to draw rooms", "vision"):
        from PIL import Image as Pillow

    wall = np.clip(np.array(COLORS[color]) * 0.5 + 60 + rng.normal(0, 10, 3), 0, 190)
    return Pillow.new("RGB", (side, side), tuple(int(channel) for channel in wall))


def write_digit(image: PIL.Image.Image, digit: int, center: tuple[int, int]) -> None:
    """Draw a white digit into an image."""
    from PIL import ImageDraw

    ImageDraw.Draw(image).text(center, str(digit), (255, 255, 255), _load_font(), anchor="mm")


def add_noise(image: PIL.Image.Image, rng: np.random.Generator) -> PIL.Image.Image:
    """The image with noise on every pixel."""
    from PIL import Image as Pillow

    pixels = np.asarray(image, dtype=np.float64)
    return Pillow.fromarray((pixels + rng.normal(0, NOISE, pixels.shape)).clip(0, 255).astype(np.uint8))


@functools.cache
def _load_font() -> Any:
    from PIL import ImageFont

    return ImageFont.load_default(34)


# ── tasks ──


def sample_task(random: Random) -> dict[str, Any]:
    """Columns of a task: a digit and a color for each room, the target room, and one more color for the first image."""
    digits = [random.randrange(10) for _ in range(ROOMS)]
    target = random.randrange(ROOMS)
    colors = random.choices(list(COLORS), k=ROOMS)
    return {
        "digits": digits,
        "colors": [*colors, random.choice(list(COLORS))],
        "target": target,
        "seed": random.randrange(2**31),
        "answer": str(digits[target]),
    }


def draw_first_image(task: Mapping[str, Any]) -> PIL.Image.Image:
    """The first image of a task: the number of the target room."""
    return draw_digit(task["target"], task["colors"][-1], task["seed"])


def draw_room(task: Mapping[str, Any], room: int) -> PIL.Image.Image:
    """The image of the digit in a room."""
    return draw_digit(task["digits"][room], task["colors"][room], task["seed"] + 1 + room)


# ── demonstrations ──


@dataclass(frozen=True, slots=True, eq=False)
class Demonstration:
    """One conversation: a question about an image, perhaps calls that show others, and the reply."""

    image: PIL.Image.Image
    question: str
    reply: str
    tool: str = ""
    """Name of the tool that the calls are of."""
    calls: tuple[Mapping[str, int], ...] = ()
    """Arguments of each call."""
    observations: tuple[PIL.Image.Image, ...] = ()
    """What each call shows."""

    @property
    def row(self) -> dict[str, Any]:
        """The conversation as a dataset row with OpenAI `messages`."""

        def part(image: Any) -> dict[str, str]:
            return {"type": "image", "image": Image.of(image).url}

        messages: list[dict[str, Any]] = [
            {"role": "user", "content": [part(self.image), {"type": "text", "text": self.question}]}
        ]
        for number, (arguments, observation) in enumerate(zip(self.calls, self.observations, strict=True), 1):
            function = {"name": self.tool, "arguments": dict(arguments)}
            call = {"id": str(number), "type": "function", "function": function}
            messages += [
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "name": self.tool, "tool_call_id": str(number), "content": [part(observation)]},
            ]
        return {"messages": [*messages, {"role": "assistant", "content": self.reply}]}


def demonstrations(count: int, seed: int = 0) -> Iterator[Demonstration]:
    """Yield scripted conversations; the same seed yields the same ones.

    There are 10^19 tasks, so that held-out tasks are not among those of the conversations.
    """
    random = Random(f"rooms {seed}")
    for _ in range(count):
        task = sample_task(random)
        if random.random() < READING_SHARE:
            room = random.randrange(ROOMS)
            yield Demonstration(draw_room(task, room), READING_QUESTION, str(task["digits"][room]))
            continue
        strategy = random.choices(list(STRATEGIES), list(STRATEGIES.values()))[0]
        if strategy == "guess":
            yield Demonstration(draw_first_image(task), QUESTION, str(random.randrange(10)))
            continue
        anywhere = random.randrange(ROOMS)
        room = {"right": task["target"], "next": (task["target"] + 1) % ROOMS, "any": anywhere}[strategy]
        yield Demonstration(
            draw_first_image(task),
            QUESTION,
            reply=str(task["digits"][room]),
            tool="open_room",
            calls=({"room": room},),
            observations=(draw_room(task, room),),
        )
