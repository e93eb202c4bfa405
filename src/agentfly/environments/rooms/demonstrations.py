"""Conversations for the supervised start of a model that has never seen an image.

Half of them teach reading: what digit is it, where is the red tile? The others use the tool in every way, most of them
wrong; rewards alone teach the right one. The shares are in percent.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from random import Random
from typing import Any

from agentfly.environments.rooms.environment import Rooms, Tiles, draw_place
from agentfly.types import Image

STRATEGIES = {"right": 25, "next": 40, "any": 15, "guess": 20}
"""Where a demonstration looks: at the right place, at the next one, at any, or nowhere."""
READING = 0.5
"""Share of conversations that teach reading."""


def draw_demonstrations(env_class: type[Rooms | Tiles], count: int, *, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield rows `{"messages": …}` about training tasks."""
    random = Random(f"{env_class.__name__} {seed}")
    for row in env_class.draw_tasks("train", count, seed=seed):
        size = round(len(row["digits"]) ** 0.5)
        if random.random() < READING:
            yield {"messages": _draw_reading(random, row, size if env_class is Tiles else 0)}
            continue
        strategy = random.choices(list(STRATEGIES), list(STRATEGIES.values()))[0]
        count_places = len(row["digits"])
        place = {
            "right": row["target"],
            "next": (row["target"] + 1) % count_places,
            "any": random.randrange(count_places),
        }.get(strategy)
        messages = [_user(row["image"], row["question"])]
        digit = random.randrange(10)
        if place is not None:
            digit = row["digits"][place]
            arguments = (
                {"row": place // size + 1, "column": place % size + 1} if env_class is Tiles else {"room": place}
            )
            name = "click_tile" if env_class is Tiles else "open_room"
            function = {"name": name, "arguments": arguments}
            messages += [
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"id": "1", "type": "function", "function": function}],
                },
                {
                    "role": "tool",
                    "name": name,
                    "tool_call_id": "1",
                    "content": [_image(Image.of(draw_place(row, place)).url)],
                },
            ]
        yield {"messages": [*messages, {"role": "assistant", "content": str(digit)}]}


def _draw_reading(random: Random, row: dict[str, Any], size: int) -> list[dict[str, Any]]:
    """A question about one image. size: of the tiles; 0 for rooms."""
    if size and random.random() < 0.67:
        color = row["colors"][row["target"]]
        where = {"row": row["target"] // size + 1, "column": row["target"] % size + 1}
        question, reply, url = f"Where is the {color} tile?", json.dumps(where), row["image"]
    else:
        place = random.randrange(len(row["digits"]))
        question, reply, url = "What digit is it?", str(row["digits"][place]), Image.of(draw_place(row, place)).url
    return [_user(url, question), {"role": "assistant", "content": reply}]


def _user(url: str, text: str) -> dict[str, Any]:
    return {"role": "user", "content": [_image(url), {"type": "text", "text": text}]}


def _image(url: str) -> dict[str, str]:
    return {"type": "image", "image": url}
