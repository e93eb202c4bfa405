"""TextArena's games, with the real package."""

from __future__ import annotations

import json
import random

import pytest

from agentfly.environments.games.textarena_game import TextArenaGame
from agentfly.errors import ConfigError, DataError
from agentfly.types import Task
from tests.environments.games.playing import answers, count_demonstrations, reset_env
from tests.fakes import call

pytest.importorskip("textarena", reason="TextArena is in the extra 'textarena', which is not installed")

HANOI = {"question": "?", "game": "TowerOfHanoi-v0", "seed": 1}
SOLUTION = ("A C", "A B", "C B", "A C", "B A", "B C", "A C")


async def test_a_puzzle_is_solved_in_a_process_of_its_own() -> None:
    observations, chain = await answers(TextArenaGame, HANOI, *(call("act", action=move) for move in SOLUTION))
    assert chain.reward == 1.0
    assert observations[-1].endswith("The game is over.")


async def test_guesses_by_hints_find_the_number_and_the_last_one_ends_it() -> None:
    for row in TextArenaGame.draw_tasks("train", 6):
        env = await reset_env(TextArenaGame, row)
        low, high = 1, 20
        while not env.over:
            guess = (low + high) // 2
            observation = (await env.act(str(guess)))["observation"]
            low, high = (guess + 1, high) if "higher" in observation else (low, guess - 1)
        assert env.won
        assert (await env.act("3"))["observation"] == "The game is over."


async def test_strange_actions_are_answered_and_earn_nothing() -> None:
    (row,) = TextArenaGame.draw_tasks("test", 1)
    observations, chain = await answers(
        TextArenaGame, row, call("act", action=7), call("act", action="x" * 1_000_000),
        call("act", action="won"), call("look"), call("act", action="[99]"), "I guessed it.",
    )  # fmt: skip
    assert "at most 1000 characters" in observations[1]
    assert "invalid move" in observations[2]
    assert observations[3] == observations[2]
    assert chain.reward == 0.0


async def test_first_observation_matches_the_task_and_drawing_keeps_the_random_state() -> None:
    state_before = random.getstate()
    games = ["FrozenLake-v0-random", "Mastermind-v0"]
    rows = {split: TextArenaGame.draw_tasks(split, 10, games=games) for split in ("train", "validation", "test")}
    assert random.getstate() == state_before
    assert [row["game"] for row in rows["train"][:4]] == games * 2
    used = await reset_env(TextArenaGame, rows["train"][1])
    for row in rows["train"][:4]:
        await used.act("1 2 3 4")
        await used.reset(Task.of(json.loads(json.dumps(row))))
        assert (await used.look(), used.moves, used.over) == (row["question"], 0, False)
    seeds = [row["seed"] for those in rows.values() for row in those]
    assert len(set(seeds)) == 30


@pytest.mark.parametrize(
    ("game", "error", "words"),
    [
        ("Nothing-v0", DataError, "no game 'Nothing-v0'"),
        ("GuessNumber-v0", DataError, "Did you mean GuessTheNumber-v0"),
        ("TicTacToe-v0", ConfigError, "not a single-player game"),
        (7, DataError, "7"),
    ],
)
async def test_unplayable_games_are_rejected(game: object, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        await reset_env(TextArenaGame, {"question": "?", "game": game})


async def test_expert_guesses_the_number_and_has_no_advice_for_other_games() -> None:
    assert await count_demonstrations(TextArenaGame, TextArenaGame.draw_tasks("test", 5)) == 5
    hanoi = await reset_env(TextArenaGame, HANOI)
    with pytest.raises(ConfigError, match="no expert for TowerOfHanoi"):
        hanoi.expert()
