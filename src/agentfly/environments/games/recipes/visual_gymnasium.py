"""Gymnasium in images: cross the frozen lake that an image shows.

    pip install 'agentfly-rl[train,gymnasium,vision]'
    agentfly train visual_gymnasium model=HuggingFaceTB/SmolVLM2-500M-Video-Instruct
    agentfly train visual_gymnasium model=Qwen/Qwen2.5-VL-3B-Instruct backend=vllm

The lakes are those of the recipe `frozen_lake`, in Gymnasium's FrozenLake with its graphics. Any environment that
renders `rgb_array` and has discrete, integer-vector or text actions works alike: `env_id` in a subclass of
`VisualGymnasium`. These commands need a pretrained vision model and have not been measured.
"""

from typing import Any

from agentfly.agents import HFAgent
from agentfly.environments.games import FrozenLake, VisualGymnasium
from agentfly.environments.games.frozen_lake import compute_distances
from agentfly.environments.games.game import OFFSETS, neighbor
from agentfly.rewards import game_won
from agentfly.training import TrainConfig
from agentfly.types import ToolCall


class LakeInImages(VisualGymnasium):
    """A frozen lake with start, goal and holes anywhere, as images."""

    max_edge = 224

    @classmethod
    def draw_tasks(cls, split: str = "train", count: int = 100, *, seed: int = 0) -> list[dict[str, Any]]:
        """The lakes of `FrozenLake`, drawn by Gymnasium."""
        env, rows = cls(), []
        for row in FrozenLake.draw_tasks(split, count, seed=seed):
            columns = {"env_id": "FrozenLake-v1", "settings": {"desc": row["lake"], "is_slippery": False}, "seed": 0}
            rows.append({"id": row["id"], **env.describe_task(columns), **columns})
        env.close_env()
        return rows

    def expert(self) -> ToolCall | str:
        """The next step of a shortest path."""
        if self.over:
            return "Done."
        lake = self.unwrapped
        rows = [b"".join(row).decode() for row in lake.desc]
        distances = compute_distances(rows)
        here = divmod(int(lake.s), lake.ncol)
        best = min(OFFSETS, key=lambda direction: distances.get(neighbor(here, direction), len(rows) ** 2))
        return ToolCall("act", {"action": best})


def agent(**model: Any) -> HFAgent:
    return HFAgent(**model, tools=[LakeInImages], reward=game_won)


tasks = LakeInImages.draw_tasks("train", 128)
eval_tasks = LakeInImages.draw_tasks("validation", 32)
config = TrainConfig(
    model="Qwen/Qwen2.5-VL-3B-Instruct",
    tasks_per_step=16,
    sampling={"max_tokens": 64},
    evaluation={"every": 10},
    checkpoint={"every": 20},
)
