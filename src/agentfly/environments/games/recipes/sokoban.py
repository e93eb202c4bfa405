"""Sokoban: push the box onto the goal, and never into a corner.

    pip install 'agentfly-rl[train]'
    agentfly sft sokoban --model new --expert 2000 --steps 800 --learning-rate 1e-3 --out warm
    agentfly train sokoban model=warm
    agentfly train sokoban model=Qwen/Qwen2.5-3B-Instruct backend=vllm optimizer.learning_rate=1e-6

A fast experiment: small rooms with one box, drawn backward from solved states, so every one can be solved. A box cannot
be pulled, so a wrong move may show many moves later. `boxes=2` and `size=8` make it harder.
"""

from typing import Any

from agentfly.agents import HFAgent
from agentfly.environments.games import Sokoban
from agentfly.environments.recipe_config import small_model_config
from agentfly.rewards import game_won


class Lettered(Sokoban):
    """Sokoban in letters: a small tokenizer keeps them apart, but merges rows of the usual symbols into few tokens."""

    symbols = "WPQBCGF"


def agent(**model: Any) -> HFAgent:
    return HFAgent(**model, tools=[Lettered], reward=game_won)


tasks = Lettered.draw_tasks("train", 4000, longest=12)
eval_tasks = Lettered.draw_tasks("validation", 100, longest=12)
config = small_model_config(max_turns=16, max_tokens=32)
