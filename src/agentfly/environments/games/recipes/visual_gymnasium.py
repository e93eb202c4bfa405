"""Gymnasium in images: see where the goal of a frozen lake is, and learn by reward to walk there.

    agentfly train visual_gymnasium --warm-start

The lakes are Gymnasium's FrozenLake with its graphics, reduced to 48 × 48 pixels: three rows and columns, the start in
the middle, the goal one or two steps away, one to four holes. There are 720 such lakes; 200 of them are only in
`eval_tasks`. A call names the field of the goal before the direction, which teaches a model of under a million
parameters to see it.

The demonstrations are careless on purpose: the named field is right, but in half of the steps the expert goes north, in
a fifth anywhere, and only in three of ten along a shortest path. `--threshold 0` also keeps chains that end in a hole.
SFT teaches to see the goal and to write calls. GRPO teaches to walk there: almost always to a goal next to the start,
and less often to one in a corner (docs/lab/environments.md). An invalid call ends the chain. Any environment that
renders `rgb_array` and has discrete, integer-vector or text actions can be shown in the same way: `env_id` in a
subclass of `VisualGymnasium`.
"""

from collections.abc import Sequence
from itertools import combinations
from random import Random
from typing import Any, Literal

from agentfly.agents import HFAgent
from agentfly.environments.games.frozen_lake import GOAL, HOLE, ICE, START, compute_distances
from agentfly.environments.games.game import Direction, find_symbols, neighbor
from agentfly.environments.games.gymnasium_env import VisualGymnasium
from agentfly.environments.recipe_config import small_model_config
from agentfly.rewards import game_won
from agentfly.tooling import tool
from agentfly.training import WarmStart
from agentfly.types import Task, ToolCall

FIELDS = [(y, x) for y in range(3) for x in range(3)]
MIDDLE = (1, 1)
COMPASS: dict[str, Direction] = {"N": "up", "S": "down", "W": "left", "E": "right"}
FAR = 9
"""More steps than any path has."""


class LakeInImages(VisualGymnasium):
    """A small frozen lake in images, with an expert that rarely looks where it goes."""

    max_edge = 48
    max_moves = 4

    async def reset(self, task: Task) -> None:
        await super().reset(task)
        self._random = Random(task.id)

    @tool
    async def go(self, goal: int, toward: Literal["N", "S", "W", "E"]) -> dict[str, Any]:
        """Take one step on the ice. Shows the lake after it.

        Args:
            goal: Field of the goal, from 1 (top left) to 9 (bottom right).
            toward: Where to go; north is up.
        """
        return await self.play(COMPASS[toward])

    def expert(self) -> ToolCall | str:
        """The field of the goal, and north, any direction, or the next step of a shortest path."""
        if self.over:
            return "Done."
        lake = self.unwrapped
        rows = [b"".join(row).decode() for row in lake.desc]
        (goal,) = find_symbols(GOAL, rows)
        luck = self._random.random()
        if luck < 0.3:
            distances = compute_distances(rows)
            here = divmod(int(lake.s), lake.ncol)
            toward = min(COMPASS, key=lambda way: distances.get(neighbor(here, COMPASS[way]), FAR))
        else:
            toward = "N" if luck < 0.8 else self._random.choice(list(COMPASS))
        return ToolCall("go", {"goal": FIELDS.index(goal) + 1, "toward": toward})


def list_lakes() -> list[list[str]]:
    """All lakes with the start in the middle, the goal one or two steps away and one to four holes, shuffled."""
    lakes = []
    ring = [field for field in FIELDS if field != MIDDLE]
    for goal in ring:
        for count in range(1, 5):
            for holes in combinations([field for field in ring if field != goal], count):
                symbols = {MIDDLE: START, goal: GOAL, **dict.fromkeys(holes, HOLE)}
                rows = ["".join(symbols.get((y, x), ICE) for x in range(3)) for y in range(3)]
                if compute_distances(rows).get(MIDDLE, FAR) <= 2:
                    lakes.append(rows)
    Random(0).shuffle(lakes)
    return lakes


def make_tasks(name: str, lakes: Sequence[list[str]], count: int) -> list[dict[str, Any]]:
    """Tasks of these lakes in turn, with ids of their own, by which the expert's steps differ."""
    env = LakeInImages()
    rows_of_lakes = []
    for rows in lakes[:count]:
        columns = {"env_id": "FrozenLake-v1", "settings": {"desc": rows, "is_slippery": False}, "seed": 0}
        rows_of_lakes.append({**env.describe_task(columns), "question": "Go to the goal.", **columns})
    env.close_env()
    return [{"id": f"{name}/{number}", **rows_of_lakes[number % len(rows_of_lakes)]} for number in range(count)]


def agent(**model: Any) -> HFAgent:
    return HFAgent(**model, tools=[LakeInImages.go], reward=game_won, on_invalid_call="end")


LAKES = list_lakes()
tasks = make_tasks("train", LAKES[200:], 3000)
eval_tasks = make_tasks("validation", LAKES[:200], 200)
requires = ("train", "gymnasium", "vision")
warm_start = WarmStart(
    expert=2000, threshold=0, steps=500, learning_rate=1e-3, batch_size=16, model="tiny-vision", train_tower=True
)
config = small_model_config(
    max_turns=5,
    max_tokens=48,
    model="tiny-vision",
    learning_rate=2e-4,
    warmup_steps=2,
    loss={"aggregation": "sequence"},
    steps=30,
    evaluation={"every": 15},
)
