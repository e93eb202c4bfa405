"""TextArena: guess a number from 1 to 20 by hints, or play another single-player game of TextArena.

    pip install 'agentfly-rl[train,textarena]'
    agentfly sft textarena --model new --expert 1000 --steps 60 --learning-rate 1e-3 --out warm
    agentfly train textarena model=warm

SFT is short to leave something to the reward: after 300 steps it wins 97 % of the games. An invalid call ends the
chain. Every instance runs in its own process. `TextArenaGame.draw_tasks(games=[…])` draws tasks of other games.
"""

from typing import Any

from agentfly.agents import HFAgent
from agentfly.environments.games import TextArenaGame
from agentfly.environments.recipe_config import small_model_config
from agentfly.rewards import game_won

PROMPT = "Play the game with the tool `act`. The action is your move."


def agent(**model: Any) -> HFAgent:
    tools = [TextArenaGame.act]
    return HFAgent(**model, tools=tools, reward=game_won, system_prompt=PROMPT, on_invalid_call="end")


tasks = TextArenaGame.draw_tasks("train", 1000)
eval_tasks = TextArenaGame.draw_tasks("validation", 200)
config = small_model_config(
    max_turns=6,
    max_tokens=32,
    learning_rate=4e-4,
    warmup_steps=2,
    steps=24,
    evaluation={"every": 12},
)
