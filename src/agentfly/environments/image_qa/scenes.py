"""Charts, tables, maps and documents, drawn with Pillow from a seed. Each has a question with one exact answer.

The same kind and seed give the same question, answer and pixels. `evidence` is the part of the image that shows the
answer. In the overview that a task shows, its text is too small to read with certainty.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from agentfly.errors import DataError, require_extra

with require_extra("ImageQA", "vision"):
    from PIL import Image, ImageDraw, ImageFont

WIDTH, HEIGHT = 768, 576
"""Pixels of a scene."""
MARGIN = 32
Box = tuple[float, float, float, float]
"""Left, top, right, bottom in pixels."""
Point = tuple[float, float]
Color = tuple[int, int, int]

BACKGROUNDS: tuple[Color, ...] = ((255, 255, 255), (250, 247, 238), (240, 244, 250), (243, 249, 243))
COLORS: tuple[Color, ...] = (
    (200, 50, 45), (45, 95, 190), (30, 130, 70), (220, 140, 20), (120, 60, 150), (20, 130, 140),
)  # fmt: skip
INK, FAINT = (30, 30, 35), (190, 192, 198)
PLACES = (
    "Alden", "Brack", "Corvo", "Delmi", "Estel", "Farno", "Gadby", "Helm", "Irwen", "Jostal", "Kemp", "Lorne", "Mavik",
    "Nolby", "Orsk", "Penn", "Quill", "Ruston", "Selby", "Tarn", "Ulmer", "Vinca", "Welby", "Yarrow",
)  # fmt: skip
GOODS = (
    "apples", "bolts", "candles", "drills", "envelopes", "forks", "gloves", "hinges", "inks", "jars", "kettles",
    "lamps", "mugs", "nails", "pens", "ropes", "scales", "tiles", "valves", "wires",
)  # fmt: skip
MEASURES = ("sales", "stock", "orders", "returns", "visitors", "exports", "staff", "costs")
MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


@dataclass(frozen=True)
class Scene:
    """An image with a question about it."""

    image: Image.Image
    question: str
    answer: str
    evidence: Box
    """The part of the image that shows the answer."""


def draw_scene(kind: str, seed: int) -> Scene:
    """Draw the scene of a kind (`chart`, `table`, `map`, `document`) and a seed. Raises DataError for other kinds."""
    if kind not in KINDS or not isinstance(seed, int):
        raise DataError(
            f"a scene has a kind ({', '.join(KINDS)}) and a whole number as seed, not {kind!r:.40}, {seed!r:.40}"
        )
    random = Random(f"{kind} {seed}")
    image = Image.new("RGB", (WIDTH, HEIGHT), random.choice(BACKGROUNDS))
    question, answer, evidence = KINDS[kind](random, ImageDraw.Draw(image))
    return Scene(image, question, answer, evidence)


@functools.cache
def load_font(size: int) -> Any:
    """Pillow's own font, so that no font of the system is needed and all systems draw the same."""
    return ImageFont.load_default(size)


def join_boxes(boxes: Sequence[Box]) -> Box:
    """The smallest box around all of them."""
    left, top, right, bottom = zip(*boxes, strict=True)
    return min(left), min(top), max(right), max(bottom)


Drawn = tuple[str, str, Box]
"""Question, answer, and the part of the image that shows it."""


def draw_chart(random: Random, draw: ImageDraw.ImageDraw) -> Drawn:
    """Bars with their values on top, or a line through labeled points."""
    count = random.randint(6, 10)
    names = random.choice((random.sample(PLACES, count), list(MONTHS[:count])))
    values = random.sample(range(12, 100), count)
    measure = random.choice(MEASURES)
    color = random.choice(COLORS)
    left, top, right, bottom = 2 * MARGIN, 2.5 * MARGIN, WIDTH - MARGIN, HEIGHT - 2 * MARGIN
    draw.text((WIDTH / 2, MARGIN), measure.capitalize(), INK, load_font(34), anchor="mm")
    for tick in range(0, 101, 20):
        y = bottom - (bottom - top) * tick / 100
        draw.line((left, y, right, y), FAINT, 1)
        draw.text((left - 10, y), str(tick), INK, load_font(16), anchor="rm")

    step = (right - left) / count
    centers = [left + step * (index + 0.5) for index in range(count)]
    tops = [bottom - (bottom - top) * value / 100 for value in values]
    if random.random() < 0.5:
        for x, y in zip(centers, tops, strict=True):
            draw.rectangle((x - step * 0.3, y, x + step * 0.3, bottom), color)
    else:
        draw.line(list(zip(centers, tops, strict=True)), color, 3)
        for x, y in zip(centers, tops, strict=True):
            draw.ellipse((x - 5, y - 5, x + 5, y + 5), color)
    for x, y, name, value in zip(centers, tops, names, values, strict=True):
        draw.text((x, y - 14), str(value), INK, load_font(17), anchor="mm")
        draw.text((x, bottom + 18), name, INK, load_font(16), anchor="mm")

    columns = [(x - step / 2, y - 30, x + step / 2, bottom + 32) for x, y in zip(centers, tops, strict=True)]
    first, second = random.sample(range(count), 2)
    if values[first] < values[second]:
        first, second = second, first
    best = values.index(max(values))
    return random.choice(
        (
            (f"How many {measure} does the chart show for {names[first]}?", str(values[first]), columns[first]),
            (f"Which entry of the chart has the most {measure}?", names[best], join_boxes(columns)),
            (
                f"By how much do the {measure} of {names[first]} exceed those of {names[second]}?",
                str(values[first] - values[second]),
                join_boxes([columns[first], columns[second]]),
            ),
        )
    )


def draw_table(random: Random, draw: ImageDraw.ImageDraw) -> Drawn:
    """A table of numbers with named rows and columns."""
    rows = random.sample(PLACES, random.randint(8, 14))
    columns = random.sample(MEASURES, random.randint(3, 5))
    cells = {row: dict(zip(columns, random.sample(range(100, 1000), len(columns)), strict=True)) for row in rows}
    height = (HEIGHT - 2 * MARGIN) / (len(rows) + 1)
    width = (WIDTH - 2 * MARGIN) / (len(columns) + 1)
    boxes: dict[tuple[str, str], Box] = {}
    for y, row in enumerate(["", *rows]):
        top = MARGIN + height * y
        if y % 2:
            draw.rectangle((MARGIN, top, WIDTH - MARGIN, top + height), (228, 231, 236))
        for x, column in enumerate(["", *columns]):
            left = MARGIN + width * x
            text = column if not row else row if not column else str(cells[row][column])
            draw.text((left + width / 2, top + height / 2), text, INK, load_font(18), anchor="mm")
            boxes[row, column] = left, top, left + width, top + height
    draw.line((MARGIN, MARGIN + height, WIDTH - MARGIN, MARGIN + height), INK, 2)

    row, column = random.choice(rows), random.choice(columns)
    values = {row: cells[row][column] for row in rows}
    best = max(values, key=values.__getitem__)
    whole_column = join_boxes([boxes["", ""], boxes[rows[-1], column]])
    if random.random() < 0.5 or list(values.values()).count(values[best]) > 1:
        question = f"What does the table give as {column} of {row}?"
        # Row name, column name and cell in one view.
        return question, str(cells[row][column]), join_boxes([boxes["", ""], boxes[row, column]])
    return f"Which row of the table has the highest {column}?", best, whole_column


def draw_map(random: Random, draw: ImageDraw.ImageDraw) -> Drawn:
    """Towns with roads between them; each road has its length."""
    names = random.sample(PLACES, random.randint(5, 7))
    places: dict[str, Point] = {}
    roads: dict[tuple[str, str], int] = {}
    # Drawn again until no two labels overlap.
    while not places or _labels_overlap((*places.values(), *_midpoints(places, roads))):
        cells = random.sample([(column, row) for column in range(4) for row in range(4)], len(names))
        for name, (column, row) in zip(names, cells, strict=True):
            x = MARGIN + (column + random.uniform(0.25, 0.75)) * (WIDTH - 2 * MARGIN) / 4
            y = MARGIN + (row + random.uniform(0.25, 0.75)) * (HEIGHT - 2 * MARGIN) / 4
            places[name] = x, y
        # A spanning tree: every town has a road to the nearest town before it.
        roads = {}
        for index, name in enumerate(names[1:], 1):
            near = min(names[:index], key=lambda other: math.dist(places[other], places[name]))
            roads[near, name] = random.randint(10, 99)
    color = random.choice(COLORS)
    for first, second in roads:
        draw.line((*places[first], *places[second]), FAINT, 5)
    for (x, y), length in zip(_midpoints(places, roads), roads.values(), strict=True):
        draw.rectangle((x - 14, y - 11, x + 14, y + 11), (255, 255, 255), FAINT)
        draw.text((x, y), str(length), INK, load_font(16), anchor="mm")
    for name, (x, y) in places.items():
        draw.ellipse((x - 7, y - 7, x + 7, y + 7), color, INK)
        draw.text((x, y - 20), name, INK, load_font(17), anchor="mm")

    first, second = random.choice(list(roads))
    pair = join_boxes([(x - 40, y - 34, x + 40, y + 16) for x, y in (places[first], places[second])])
    north = min(names, key=lambda name: places[name][1])
    positions = sorted(places[name][1] for name in names)
    if random.random() < 0.7 or positions[1] - positions[0] < 12:
        return f"How long is the road between {first} and {second}?", str(roads[first, second]), pair
    return "Which town of the map lies farthest north (up)?", north, (0, 0, WIDTH, HEIGHT / 2)


def _midpoints(places: Mapping[str, Point], roads: Iterable[tuple[str, str]]) -> list[Point]:
    pairs = [(places[first], places[second]) for first, second in roads]
    return [((x1 + x2) / 2, (y1 + y2) / 2) for (x1, y1), (x2, y2) in pairs]


def _labels_overlap(points: Sequence[Point]) -> bool:
    """Whether two labels overlap. A town with its name, or the length of a road, takes at most 60 × 40 pixels."""
    boxes = [(x - 30, y - 29, x + 30, y + 11) for x, y in points]
    pairs = itertools.combinations(boxes, 2)
    return any(a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3] for a, b in pairs)


def draw_document(random: Random, draw: ImageDraw.ImageDraw) -> Drawn:
    """An invoice: number, date, customer, items with quantity and price, total."""
    number = f"{random.choice('ABCDEFGHKLMNPRSTUVWXYZ')}{random.randint(10_000, 99_999)}"
    day = f"{random.randint(1, 28)} {random.choice(MONTHS)} {random.randint(2015, 2030)}"
    customer = random.choice(PLACES)
    items = [
        (name, random.randint(1, 40), random.randint(2, 60)) for name in random.sample(GOODS, random.randint(5, 8))
    ]
    total = sum(quantity * price for _, quantity, price in items)
    left, right = 3 * MARGIN, WIDTH - 3 * MARGIN
    draw.rectangle((2 * MARGIN, MARGIN, WIDTH - 2 * MARGIN, HEIGHT - MARGIN), (255, 255, 255), FAINT, 2)
    draw.text((left, 2 * MARGIN), "Invoice", random.choice(COLORS), load_font(36), anchor="lm")
    fields = {"Number": number, "Date": day, "Customer": f"{customer} Ltd."}
    boxes: dict[str, Box] = {}
    for row, (name, value) in enumerate(fields.items()):
        y = 3.4 * MARGIN + row * 26
        draw.text((left, y), f"{name}: {value}", INK, load_font(17), anchor="lm")
        boxes[name] = left - 10, y - 16, WIDTH / 2, y + 16
    quantity_x, price_x, amount_x = left + 260, left + 400, right
    y = 6.2 * MARGIN
    for x, title in ((quantity_x, "quantity"), (price_x, "price each"), (amount_x, "amount")):
        draw.text((x, y), title, INK, load_font(16), anchor="rm")
    draw.line((left, y + 16, right, y + 16), INK, 1)
    for name, quantity, price in items:
        y += 34
        draw.text((left, y), name, INK, load_font(17), anchor="lm")
        for x, amount in ((quantity_x, quantity), (price_x, price), (amount_x, quantity * price)):
            draw.text((x, y), str(amount), INK, load_font(17), anchor="rm")
        boxes[name] = left - 10, 6.2 * MARGIN - 16, right + 10, y + 16
    draw.line((left, y + 18, right, y + 18), INK, 1)
    draw.text((amount_x, y + 38), f"Total: {total}", INK, load_font(19), anchor="rm")
    boxes["Total"] = WIDTH / 2, y + 20, right + 10, y + 56

    name, quantity, price = random.choice(items)
    return random.choice(
        (
            ("What is the number of the invoice?", number, boxes["Number"]),
            ("What is the date of the invoice, as written?", day, boxes["Date"]),
            ("What is the total of the invoice?", str(total), boxes["Total"]),
            (f"How many {name} does the invoice list?", str(quantity), boxes[name]),
            (f"What is the price of each of the {name} on the invoice?", str(price), boxes[name]),
        )
    )


KINDS = {"chart": draw_chart, "table": draw_table, "map": draw_map, "document": draw_document}
