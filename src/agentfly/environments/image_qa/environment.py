"""Questions about images, with a tool that zooms into a part, and the reward for the exact answer."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar

from agentfly import threads
from agentfly.environment import Environment
from agentfly.environments.data import belongs_to, sample_tasks
from agentfly.errors import ConfigError, DataError
from agentfly.rewards.answers import extract_answer
from agentfly.scoring import reward
from agentfly.tooling import tool
from agentfly.types import Image, Task, ToolCall
from agentfly.vision.images import COORDINATE_MAX, open_image

if TYPE_CHECKING:
    import PIL.Image

    from agentfly.environments.image_qa.scenes import Scene

KINDS = ("chart", "table", "map", "document")
MIN_PIXELS = 8
"""Smallest width and height of a part to zoom into, in pixels of the image."""


class ImageQA(Environment):
    """An image with a question about it; parts of the image can be enlarged."""

    scored_by = "image_qa_match"
    max_edge: ClassVar[int] = 384
    """Pixels of the longer edge of what the model sees: the overview in drawn tasks, and every zoomed part."""

    @classmethod
    def draw_tasks(
        cls, split: str = "train", count: int = 100, *, seed: int = 0, kinds: Sequence[str] = KINDS
    ) -> list[dict[str, Any]]:
        """Charts, tables, maps and documents (`kinds`), each with a question that has one exact answer."""
        from agentfly.environments.image_qa.scenes import draw_scene

        if not kinds or not set(kinds) <= set(KINDS):
            raise ConfigError(f"kinds are some of {', '.join(KINDS)}, not {list(kinds)!r:.80}")

        def draw(random: Random, _: int) -> tuple[str, dict[str, Any]] | None:
            kind, number = random.choice(list(kinds)), random.randrange(2**53)
            content = f"{kind} {number}"
            if not belongs_to(content, split):  # before the drawing, which is what takes time
                return None
            scene = draw_scene(kind, number)
            overview = Image.of(resize(scene.image, cls.max_edge)).url
            columns = {"question": scene.question, "image": overview, "answer": scene.answer}
            return content, {**columns, "kind": kind, "seed": number}

        return sample_tasks("image_qa", split, count, seed, draw)

    async def reset(self, task: Task) -> None:
        """Load the image: drawn in full size from the columns `kind` and `seed`, else the column `image`."""
        self.scene: Scene | None = None
        self._zooms = 0
        columns = task.columns
        if "kind" in columns:
            from agentfly.environments.image_qa.scenes import draw_scene

            self.scene = await threads.call(draw_scene, columns["kind"], columns.get("seed"))
            self.image = self.scene.image
        elif columns.get("image") is not None:
            self.image = await threads.call(open_image, Image.of(columns["image"]))
        else:
            raise DataError(f"task {task.id!r} has no column 'image'; ImageQA.draw_tasks draws tasks that have")

    @tool
    async def zoom(self, left: int, top: int, right: int, bottom: int) -> dict[str, Any]:
        """Enlarge a part of the image. The coordinates go from 0 (left, top) to 1000 (right, bottom).

        Args:
            left: Left edge of the part.
            top: Upper edge of the part.
            right: Right edge of the part, greater than left.
            bottom: Lower edge of the part, greater than top.
        """
        if not (0 <= left < right <= COORDINATE_MAX and 0 <= top < bottom <= COORDINATE_MAX):
            error = f"Error: left < right and top < bottom must be from 0 to {COORDINATE_MAX}."
            return {"observation": f"{error} You gave {left}, {top}, {right}, {bottom}."[:300]}
        width, height = self.image.size
        # At least MIN_PIXELS in each direction, or the whole image if it is smaller.
        box = (*_widen(left, right, width), *_widen(top, bottom, height))
        self._zooms += 1
        cropped = self.image.crop((box[0], box[2], box[1], box[3]))
        return {"observation": "", "image": Image.of(resize(cropped, self.max_edge)), "pixels": list(cropped.size)}

    def expert(self) -> ToolCall | str:
        """Zoom into the part that shows the answer, then answer. Only drawn tasks have one."""
        if self.scene is None:
            raise ConfigError("ImageQA has an expert for the tasks that it draws, not for other images")
        if self._zooms:
            return self.scene.answer
        left, top, right, bottom = self.scene.evidence
        width, height = self.scene.image.size
        return ToolCall(
            "zoom",
            {
                "left": max(0, int(left / width * COORDINATE_MAX)),
                "top": max(0, int(top / height * COORDINATE_MAX)),
                "right": min(COORDINATE_MAX, int(right / width * COORDINATE_MAX) + 1),
                "bottom": min(COORDINATE_MAX, int(bottom / height * COORDINATE_MAX) + 1),
            },
        )


def _widen(start: int, end: int, pixels: int) -> tuple[int, int]:
    """First and last pixel of a range of coordinates, widened to MIN_PIXELS where the image has as many."""
    first, last = start * pixels // COORDINATE_MAX, -(-end * pixels // COORDINATE_MAX)
    first = max(0, min(first, last - MIN_PIXELS))
    return first, min(pixels, max(last, first + MIN_PIXELS))


def resize(image: PIL.Image.Image, edge: int) -> PIL.Image.Image:
    """Scale an image, keeping its proportions, so that its longer edge has `edge` pixels."""
    from PIL import Image as Pillow

    scale = edge / max(image.size)
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    return image.resize(size, Pillow.Resampling.BICUBIC)


@reward
def image_qa_match(prediction: str, answer: str) -> float:
    """1 if the answer is right, else 0: equal numbers, or the same text without case, outer spaces and a final period.

    The answer is the last `<answer>…</answer>` of the final reply, or the whole reply without one.
    """
    predicted, right = (_normalize(text) for text in (extract_answer(prediction), str(answer)))
    return float(predicted == right)


def _normalize(text: str) -> str | float:
    plain = " ".join(text.lower().split()).removesuffix(".")
    try:
        return float(plain.replace(",", "")) if plain[:1].isdigit() or plain[:1] in "+-" else plain
    except ValueError:
        return plain
