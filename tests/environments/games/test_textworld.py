"""TextWorld's games, with the real package."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentfly.environments.games.textworld_game import TextWorldGame
from agentfly.errors import DataError
from agentfly.types import Task
from tests.environments.games.playing import answers, count_demonstrations, reset_env, winning
from tests.fakes import call

pytest.importorskip("textworld", reason="TextWorld is in the extra 'textworld', which is not installed")

SIZES = {"rooms": 2, "objects": 2, "quest_length": 2}


@pytest.fixture(scope="module")
def games(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("games")


async def test_games_are_made_compiled_and_won(games: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTFLY_CACHE", str(games))
    row, second = TextWorldGame.draw_tasks("train", 2, **SIZES)
    assert await count_demonstrations(TextWorldGame, [row]) == 1
    (compiled,) = (games / "textworld").iterdir()
    assert sorted(path.suffix for path in compiled.iterdir()) == [".json", ".ni", ".z8"]

    strange = [call("act", action=action) for action in ("x" * 1_000_000, 7, "dance the tango", "")]
    observations, chain = await answers(TextWorldGame, row, *strange, call("look"), "I have won.")
    assert "at most 1000 characters" in observations[0]
    assert "-=" in observations[3]
    assert observations[4] == observations[3]
    assert chain.reward == 0.0

    of_files = []
    for file in (compiled / "game.z8", compiled / "game.json"):  # the second is compiled again
        env = await reset_env(TextWorldGame, {"question": "?", "game": str(file)})
        first_view = env.view
        assert "$" not in first_view
        assert not first_view.endswith(">")
        of_files.append((first_view, await winning(env)))
        assert env.won
        await env.reset(Task.of({"question": "?", "game": row["game"]}))
        assert (env.view, env.won, env.moves) == (first_view, False, 0)
        await env.close()
    assert of_files[0] == of_files[1]
    assert second["game"] != row["game"]


def test_splits_share_no_game() -> None:
    rows = {split: TextWorldGame.draw_tasks(split, 2, **SIZES) for split in ("train", "validation", "test")}
    assert rows["train"] == TextWorldGame.draw_tasks("train", 2, **SIZES)
    assert len({row["game"]["seed"] for those in rows.values() for row in those}) == 6


async def test_malformed_games_are_rejected(tmp_path: Path) -> None:
    class Here(TextWorldGame):
        folder = str(tmp_path)

    for game in (None, 7, "nowhere.z8", {"seed": 1, "monsters": 3}):
        with pytest.raises(DataError, match="game"):
            await reset_env(Here, {"question": "?", "game": game})
    broken = tmp_path / "broken.z8"
    broken.write_bytes(b"no story")
    with pytest.raises(DataError, match="cannot play"):
        await reset_env(Here, {"question": "?", "game": str(broken)})
