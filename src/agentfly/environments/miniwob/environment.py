"""MiniWoB++ (Liu et al., 2018) in a real Chromium: screenshots, and clicks, keys and text.

The tasks' own pages run unchanged. A page is seeded before its first script runs, and the episode has no time limit, so
an episode follows from the task and the actions alone. The reward is the page's own, without its discount for time.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import re
from collections.abc import Awaitable, Callable, Sequence
from importlib import resources
from pathlib import Path
from random import Random
from typing import Any, ClassVar

from agentfly.environment import Pool
from agentfly.environments.browser import BrowserEnvironment, Coordinate, Key
from agentfly.environments.data import sample_tasks
from agentfly.errors import ConfigError, DataError, install_command
from agentfly.scoring import reward
from agentfly.tooling import tool
from agentfly.types import Image, Task, ToolCall
from agentfly.vision.images import COORDINATE_MAX, open_image

WIDTH, HEIGHT = 160, 210
"""Pixels of a page."""
WINDOW = (500, 240)
"""Pixels of the browser's window, as in MiniWoB++: next to the page is a panel that the model does not see."""
MAX_TEXT = 200
"""Characters that can be typed in one action."""
MAX_SCROLL = 50_000
QUESTION = (
    "A small web page is open. Its first lines, on yellow, say what to do. "
    "Look at a screenshot, then act on the page until it is done."
)
TASKS = (
    "click-button", "click-button-sequence", "click-checkboxes", "click-checkboxes-transfer", "click-color",
    "click-dialog", "click-dialog-2", "click-link", "click-option", "click-tab", "click-test", "click-test-2",
    "click-test-transfer", "click-widget", "enter-password", "enter-text", "enter-text-dynamic", "find-word",
    "focus-text", "focus-text-2", "login-user", "odd-or-even", "simple-arithmetic", "unicode-test",
)  # fmt: skip
"""Tasks that have an expert, and are drawn by default."""


class MiniWoB(BrowserEnvironment):
    """A small web page with a goal, seen in screenshots and used with mouse and keyboard."""

    # A browser has a process of its own, with a worker that ends with it.
    pool = Pool(runtime="process", memory=400 << 20, start_timeout=300.0, reset_timeout=120.0)
    scored_by = "miniwob_reward"
    scale: ClassVar[int] = 1
    """Screenshots are enlarged by this factor."""
    window_size = WINDOW
    screenshot_size = (WIDTH, HEIGHT)

    @classmethod
    def draw_tasks(
        cls, split: str = "train", count: int = 100, *, seed: int = 0, tasks: Sequence[str] | None = None
    ) -> list[dict[str, Any]]:
        """Episodes of `tasks`, each with a seed of its own. None: all tasks that have an expert."""
        names = list(TASKS if tasks is None else tasks)
        for name in names:
            find_page(name)

        def draw(random: Random, _: int) -> tuple[str, dict[str, Any]]:
            row = {"task": random.choice(names), "seed": random.randrange(2**31)}
            return f"{row['task']} {row['seed']}", {"question": QUESTION, **row}

        return sample_tasks("miniwob", split, count, seed, draw)

    async def start(self) -> None:
        """Start the browser."""
        find_html()
        await super().start()

    async def reset(self, task: Task) -> None:
        """Load the page of the column `task` and start an episode with the column `seed`."""
        name, seed = task.columns.get("task"), task.columns.get("seed")
        if not isinstance(seed, int):
            raise DataError(f"task {task.id!r} needs a whole number in the column 'seed', not {seed!r:.40}")
        self.task = find_page(name)
        self.score = 0.0
        """The page's reward, from -1 to 1. 0 until the episode is over."""
        self.over = False
        self._seen = False
        self.actions = 0
        """Number of actions on the page so far."""
        await self.browser.open(f"/miniwob/{self.task}.html", functools.partial(serve_file, seed=seed))
        self.instruction = str(await self._run_script("start.js", str(seed)))

    @tool
    async def screenshot(self) -> dict[str, Any]:
        """Look at the page."""
        return await self._observe()

    @tool
    async def click_at(self, x: Coordinate, y: Coordinate) -> dict[str, Any]:
        """Click on a point of the screenshot. Shows the page after it.

        Args:
            x: 0 (left edge) to 1000 (right edge).
            y: 0 (upper edge) to 1000 (lower edge).
        """
        return await self._act(lambda: self.browser.click(*self.to_pixels(x, y)))

    @tool
    async def type_text(self, text: str) -> dict[str, Any]:
        """Type text into the element that was clicked on. Shows the page after it.

        Args:
            text: What to type.
        """
        if len(text) > MAX_TEXT:
            return {"observation": f"Error: at most {MAX_TEXT} characters can be typed at once, not {len(text)}."}
        typed = text.encode("utf-8", "replace").decode()  # half a surrogate pair is no character
        return await self._act(lambda: self.browser.type_text(typed))

    @tool
    async def press_key(self, key: Key) -> dict[str, Any]:
        """Press a key. Shows the page after it.

        Args:
            key: Name of the key.
        """
        return await self._act(lambda: self.browser.press_key(key))

    @tool
    async def scroll(
        self, down: int, x: Coordinate = COORDINATE_MAX // 2, y: Coordinate = COORDINATE_MAX // 2
    ) -> dict[str, Any]:
        """Turn the mouse wheel over a point of the screenshot. Shows the page after it.

        Args:
            down: How far to scroll down; 1000 is the height of the screenshot. Negative to scroll up.
            x: 0 (left edge) to 1000 (right edge).
            y: 0 (upper edge) to 1000 (lower edge).
        """
        if abs(down) > MAX_SCROLL:
            return {"observation": f"Error: `down` is from {-MAX_SCROLL} to {MAX_SCROLL}."}
        return await self._act(lambda: self.browser.scroll(*self.to_pixels(x, y), down * HEIGHT / COORDINATE_MAX))

    async def _act(self, action: Callable[[], Awaitable[None]]) -> dict[str, Any]:
        if self.over:
            return {"observation": "The task is over.", "ends_chain": True}
        self.actions += 1
        await action()
        self.over, self.score = await self.browser.evaluate(
            "window.expertClicked = true, [WOB_DONE_GLOBAL, WOB_RAW_REWARD_GLOBAL]"
        )
        if self.over:
            return {"observation": "The task is over.", "ends_chain": True}
        return await self._observe()

    async def _run_script(self, name: str, argument: str) -> Any:
        """Call the function of a script in the page."""
        script = (resources.files(__package__) / name).read_text(encoding="utf-8")
        return await self.browser.evaluate(f"({script})({json.dumps(argument)})")

    async def _observe(self) -> dict[str, Any]:
        self._seen = True
        image = Image.of(await self.browser.screenshot(WIDTH, HEIGHT))
        if self.scale != 1:
            from PIL.Image import Resampling

            size = (WIDTH * self.scale, HEIGHT * self.scale)
            image = Image.of(open_image(image).resize(size, Resampling.LANCZOS))
        return {"observation": "", "image": image}

    async def expert(self) -> ToolCall | str:
        """A screenshot, then the actions of a program that reads the page's elements. Only TASKS have an expert."""
        if self.over:
            return "Done."
        if self.task not in TASKS:
            raise ConfigError(f"MiniWoB has no expert for {self.task}; there is one for {', '.join(TASKS)}")
        if not self._seen:
            return ToolCall("screenshot", {})
        action = await self._run_script("expert.js", self.task)
        if "type" in action:
            return ToolCall("type_text", {"text": action["type"]})
        x, y = action["click"]
        return ToolCall("click_at", {"x": round(x * COORDINATE_MAX / WIDTH), "y": round(y * COORDINATE_MAX / HEIGHT)})


@functools.cache
def find_html() -> Path:
    """The folder with MiniWoB++'s pages. Raises ConfigError if the package is missing."""
    spec = importlib.util.find_spec("miniwob")  # found without importing it, which would register its environments
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"MiniWoB needs miniwob, which is not installed: {install_command('gui')}")
    return Path(spec.submodule_search_locations[0]) / "html"


def find_page(name: object) -> str:
    """The name of a task, if there is a page for it. Raises DataError."""
    if (
        isinstance(name, str)
        and re.fullmatch(r"[a-z0-9-]+", name)
        and (find_html() / "miniwob" / f"{name}.html").is_file()
    ):
        return name
    examples = ", ".join(TASKS[:4])
    raise DataError(f"there is no MiniWoB++ task {name!r:.80}; there are {examples} and the others of the package")


def serve_file(path: str, *, seed: int) -> bytes | None:
    """A file of MiniWoB++ for the browser. None if there is none.

    seed: of the random numbers, which some pages draw before the episode starts.
    """
    root = find_html()
    file = (root / path.lstrip("/")).resolve()
    if not file.is_relative_to(root.resolve()) or not file.is_file():
        return None
    content = file.read_bytes()
    return content + f"\nMath.seedrandom({json.dumps(str(seed))});\n".encode() if path == "/core/core.js" else content


@reward
def miniwob_reward(env: MiniWoB) -> dict[str, Any]:
    """The page's own reward, -1 to 1, without its discount for time. 0 if the episode is not over.

    Metrics: `success` (the reward is positive), and `actions`, the number of actions.
    """
    return {"reward": env.score, "success": float(env.score > 0), "actions": env.actions}
