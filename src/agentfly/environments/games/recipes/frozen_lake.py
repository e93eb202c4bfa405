"""FrozenLake: walk to the goal, and learn by reward to look where the holes are.

    agentfly train frozen_lake --warm-start
    agentfly train frozen_lake model=Qwen/Qwen2.5-3B-Instruct backend=vllm optimizer.learning_rate=1e-6

A fast experiment: thousands of lakes are drawn in seconds, and a step takes microseconds. The demonstrations are
careless on purpose: in two of three steps their expert heads for the goal, up or down first, and does not look at
holes. `--threshold 0` also keeps chains that end in one. SFT teaches the calls, the directions and, a little, the
holes. GRPO teaches the rest. Evaluation lakes are never trained on.

The lakes have four rows and columns and 35 % holes. They are described in words, from where the player stands, which a
model of a million parameters learns to read in a few minutes. With `FrozenLake` in place of `CarelessLake`, the lake
is shown as a grid, and the expert takes a shortest path.
"""

from collections.abc import Sequence
from random import Random
from typing import Any

from agentfly.agents import HFAgent
from agentfly.environments.games.frozen_lake import GOAL, FrozenLake, symbol_at
from agentfly.environments.games.game import OFFSETS, Place, describe_offset, distance, find_symbols, neighbor
from agentfly.environments.recipe_config import small_model_config
from agentfly.rewards import game_won
from agentfly.training import WarmStart
from agentfly.types import Task, ToolCall

NAMES = {"S": "ice", "F": "ice", "H": "hole", "G": "goal", "": "edge"}


class CarelessLake(FrozenLake):
    """A frozen lake in words, with an expert that looks at the holes in one of three steps."""

    question = "Cross the frozen lake.{slippery}\n{lake}"

    @classmethod
    def render(cls, rows: Sequence[str], player: Place) -> str:
        """Where the goal is, and what is next to the player."""
        (goal,) = find_symbols(GOAL, rows)
        around = ", ".join(f"{way} {NAMES[symbol_at(rows, neighbor(player, way))]}" for way in OFFSETS)
        return f"The goal is {describe_offset(player, goal)}. Around you: {around}."

    async def reset(self, task: Task) -> None:
        await super().reset(task)
        self._random = Random(task.id)

    def expert(self) -> ToolCall | str:
        """The next step of a shortest path, or a step that is closer to the goal, whatever is there."""
        if self.over or self._random.random() < 0.35:
            return super().expert()
        (goal,) = find_symbols(GOAL, self._rows)
        blind = min(OFFSETS, key=lambda way: distance(neighbor(self._at, way), goal))
        return ToolCall("move", {"direction": blind})


def agent(**model: Any) -> HFAgent:
    return HFAgent(**model, tools=[CarelessLake], reward=game_won)


tasks = CarelessLake.draw_tasks("train", 5000, holes=0.35)
eval_tasks = CarelessLake.draw_tasks("validation", 200, holes=0.35)
requires = ("train",)
warm_start = WarmStart(expert=3000, threshold=0, steps=250, learning_rate=1e-3, batch_size=16)
config = small_model_config(
    max_turns=10,
    max_tokens=32,
    tasks_per_step=32,
    loss={"aggregation": "sequence"},
    warmup_steps=2,
    steps=24,
    evaluation={"every": 12},
)
