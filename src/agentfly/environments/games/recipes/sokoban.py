"""Sokoban: walk around the box and push it onto the goal, and learn by reward which pushes are wrong.

    agentfly train sokoban --warm-start
    agentfly train sokoban model=Qwen/Qwen2.5-3B-Instruct backend=vllm optimizer.learning_rate=1e-6

Small rooms with one box, which can be solved in three to six moves. They are drawn backward from solved states, so
every one can be solved. A box cannot be pulled, so a wrong push is final. The demonstrations are careless on purpose:
in two of three moves their expert takes the straight way to the place behind the box, and looks neither at walls nor
at the box, which it may push away. `--threshold 0` also keeps chains that fail. SFT teaches the calls and, a little,
the detours. GRPO teaches the rest.

The room is described in words, from where the player stands, which a model of a million parameters learns to read in a
few minutes. With `Sokoban` in place of `CarelessSokoban`, the room is shown as a grid, and the expert takes a shortest
solution. `boxes=2` and `size=8` make that harder.
"""

from random import Random
from typing import Any

from agentfly.agents import HFAgent
from agentfly.environments.games.game import OFFSETS, Place, describe_offset, distance, neighbor
from agentfly.environments.games.sokoban import OPPOSITE, Sokoban, SokobanRoom, SokobanState
from agentfly.environments.recipe_config import small_model_config
from agentfly.rewards import game_won
from agentfly.training import WarmStart
from agentfly.types import Task, ToolCall


class CarelessSokoban(Sokoban):
    """A room with one box in words, with an expert that looks where it goes in one of three moves."""

    question = "Push the box onto the goal.\n{room}"

    @classmethod
    def render(cls, room: SokobanRoom, state: SokobanState) -> str:
        """Where the box and the goal are, and the walls next to the player and to the box."""

        def walls(cell: Place) -> str:
            return " ".join(way for way in OFFSETS if neighbor(cell, way) not in room.floor) or "none"

        player, (box,), (goal,) = state.player, state.boxes, room.goals
        return (
            f"The box is {describe_offset(player, box)} of you, the goal {describe_offset(box, goal)} of the box. "
            f"Walls near you: {walls(player)}; near the box: {walls(box)}."
        )

    async def reset(self, task: Task) -> None:
        await super().reset(task)
        self._random = Random(task.id)

    def expert(self) -> ToolCall | str:
        """The next move of a shortest solution, or one of the straight way to a push toward the goal."""
        careful = super().expert() if self.over or self._random.random() < 0.35 else ""
        if self.over or isinstance(careful, ToolCall):
            return careful
        (box,), (goal,) = self._state.boxes, self._room.goals
        push = min(OFFSETS, key=lambda way: distance(neighbor(box, way), goal))
        behind = neighbor(box, OPPOSITE[push])
        if self._state.player == behind:
            return ToolCall("move", {"direction": push})
        straight = min(OFFSETS, key=lambda way: distance(neighbor(self._state.player, way), behind))
        return ToolCall("move", {"direction": straight})


def agent(**model: Any) -> HFAgent:
    return HFAgent(**model, tools=[CarelessSokoban], reward=game_won, on_invalid_call="end")


tasks = CarelessSokoban.draw_tasks("train", 4000, longest=6)
eval_tasks = CarelessSokoban.draw_tasks("validation", 200, longest=6)
requires = ("train",)
warm_start = WarmStart(expert=3000, threshold=0, steps=350, learning_rate=1e-3)
config = small_model_config(
    max_turns=8,
    max_tokens=32,
    tasks_per_step=24,
    loss={"aggregation": "sequence"},
    warmup_steps=2,
    steps=20,
    evaluation={"every": 20},
)
