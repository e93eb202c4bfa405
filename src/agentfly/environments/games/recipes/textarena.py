"""TextArena: guess a number from 1 to 20 by hints, or play another single-player game of TextArena.

    agentfly train textarena --warm-start

Five guesses suffice if each bisects what the hints leave. The demonstrations do so in one of three guesses. In the
others their expert guesses the smallest number that is left, and `--threshold 0` also keeps the games that it loses.
SFT teaches both, and the calls. GRPO teaches to bisect. All tasks have the same prompt, and one of twenty numbers.

An invalid call ends the chain. Every instance runs in its own process. `TextArenaGame.draw_tasks(games=[…])` draws
tasks of other games.
"""

from random import Random
from typing import Any

from agentfly.agents import HFAgent
from agentfly.environments.games.textarena_game import TextArenaGame
from agentfly.environments.recipe_config import small_model_config
from agentfly.rewards import game_won
from agentfly.training import WarmStart
from agentfly.types import Task, ToolCall

PROMPT = "Play the game with the tool `act`. The action is your move."


class SlowGuesses(TextArenaGame):
    """GuessTheNumber with an expert that bisects in one of three guesses, and counts up in the others."""

    async def reset(self, task: Task) -> None:
        await super().reset(task)
        self._random = Random(task.id)

    def expert(self) -> ToolCall | str:
        """The middle, or the smallest, of the numbers that the hints leave."""
        if self.over or self._random.random() < 0.35:
            return super().expert()
        return ToolCall("act", {"action": str(self.possible_numbers()[0])})


def agent(**model: Any) -> HFAgent:
    tools = [SlowGuesses.act]
    return HFAgent(**model, tools=tools, reward=game_won, system_prompt=PROMPT, on_invalid_call="end")


tasks = SlowGuesses.draw_tasks("train", 1500)
eval_tasks = SlowGuesses.draw_tasks("validation", 200)
requires = ("train", "textarena")
warm_start = WarmStart(expert=1500, threshold=0, steps=300, learning_rate=1e-3)
config = small_model_config(
    max_turns=5,
    max_tokens=32,
    loss={"aggregation": "sequence"},
    warmup_steps=2,
    steps=40,
    evaluation={"every": 40},
)
