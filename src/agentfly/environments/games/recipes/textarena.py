"""TextArena: guess a number from 1 to 20 by hints, or play another single-player game of TextArena.

    pip install 'agentfly-rl[train,textarena]'
    agentfly sft textarena --model new --expert 1000 --steps 300 --learning-rate 1e-3 --out warm
    agentfly train textarena model=warm

Every instance runs in its own process. `TextArenaGame.draw_tasks(games=[…])` draws tasks of other games.
"""

from typing import Any

from agentfly.agents import HFAgent
from agentfly.environments.games import TextArenaGame
from agentfly.rewards import game_won
from agentfly.training import TrainConfig

PROMPT = "Play the game with the tool `act`. The action is your move."


def agent(**model: Any) -> HFAgent:
    return HFAgent(**model, tools=[TextArenaGame.act], reward=game_won, system_prompt=PROMPT)


tasks = TextArenaGame.draw_tasks("train", 256)
eval_tasks = TextArenaGame.draw_tasks("validation", 50)
config = TrainConfig(sampling={"max_tokens": 32}, optimizer={"learning_rate": 5e-4}, steps=50, evaluation={"every": 10})
