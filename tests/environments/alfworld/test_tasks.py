"""Sources of games: generated, or read from the official files."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import pytest

from agentfly.data import read_tasks
from agentfly.environments.alfworld import ALFWorld
from agentfly.environments.alfworld.game import ALFWorldGame, TaskType
from agentfly.environments.alfworld.household import Household, next_command
from agentfly.environments.alfworld.tasks import content_key, official_tasks
from agentfly.errors import ConfigError, DataError
from tests.environments.alfworld.official import write_problem

GRAMMAR = 'action PutObject { template :: "move {o} to {r}"; } "rhs": "Your task is to: put a cup on shelf."'


def games(count: int, **settings: object) -> list[ALFWorldGame]:
    return [ALFWorldGame.from_json(row["game"]) for row in ALFWorld.draw_tasks(count=count, **settings)]  # type: ignore[arg-type]


@pytest.mark.parametrize("explores", [False, True])
@pytest.mark.parametrize("kind", TaskType)
def test_expert_wins_every_kind_of_task(kind: TaskType, explores: bool) -> None:
    for game in games(25, kinds=[kind.value], seed=5):
        house, steps = Household(game), 0
        while (command := next_command(house, explores=explores)) is not None:
            assert command in house.commands
            house.step(command)
            steps += 1
        assert house.won
        assert 2 <= steps <= 80


def test_exploring_expert_uses_only_observed_information() -> None:
    for game in games(30, seed=6):
        house = Household(game)
        read = house.introduction()
        while (command := next_command(house, explores=True)) is not None:
            if command.startswith(("take", "use")):
                assert f"a {command.split(' from ')[0].split(' ', 1)[1]}" in read
            read += house.step(command)


def test_expert_wins_from_any_state() -> None:
    from tests.environments.alfworld.record import wander

    for number, game in enumerate(games(40, seed=8)):
        house = Household(game)
        for command in wander(game, number):
            house.step(command)
        for _ in range(100):
            if (command := next_command(house, explores=True)) is None:
                break
            house.step(command)
        assert house.won


def test_splits_are_fixed_and_share_no_game() -> None:
    splits = {(split, seed): games(60, split=split, seed=seed) for split in ("train", "validation", "test")
              for seed in (0, 1)}  # fmt: skip
    marks = [content_key(game) for those in splits.values() for game in those]
    assert len(set(marks)) == len(marks)
    assert splits["train", 0] == games(60)
    assert {game.goal.kind for game in splits["test", 0]} == set(TaskType)


def test_question_does_not_reveal_locations() -> None:
    for row in ALFWorld.draw_tasks("train", 30):
        things = [thing["name"] for thing in row["game"]["things"]]
        assert not [name for name in things if f"{name}," in row["question"] or f"{name}." in row["question"]]


def test_rows_go_through_a_file(tmp_path: Path) -> None:
    rows = ALFWorld.draw_tasks("train", 3)
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    assert [task.columns["game"] for task in read_tasks(path)] == [row["game"] for row in rows]


def test_rooms_argument_selects_rooms() -> None:
    for game in games(20, split="train", rooms=["bathroom"]):
        assert {"SinkBasin", "Toilet"} <= {receptacle.type for receptacle in game.receptacles}


def test_unknown_names_are_rejected() -> None:
    with pytest.raises(ConfigError, match="look_at_obj_in_light"):
        ALFWorld.draw_tasks("train", 1, kinds=["dance"])
    with pytest.raises(ConfigError, match="no room 'attic'; there are kitchen"):
        ALFWorld.draw_tasks("train", 1, rooms=["attic"])
    with pytest.raises(ConfigError, match="pick_heat_then_place_in_recep cannot be done in bathroom"):
        ALFWorld.draw_tasks("train", 1, kinds=["pick_heat_then_place_in_recep"], rooms=["bathroom"])
    with pytest.raises(ConfigError, match="validation"):
        ALFWorld.draw_tasks("valid", 1)
    with pytest.raises(DataError, match="valid_seen"):
        official_tasks("dev")


def test_missing_official_games_say_where_they_come_from(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("AGENTFLY_DATA", raising=False)
    with pytest.raises(DataError, match=r"alfworld-download.*set AGENTFLY_DATA"):
        official_tasks("train")
    monkeypatch.setenv("AGENTFLY_DATA", str(tmp_path))
    with pytest.raises(DataError, match=r"json_2.1.1/train; they come from.*alfworld-download"):
        official_tasks("train")


def test_games_are_read_as_downloaded_and_packed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AGENTFLY_DATA", str(tmp_path))
    problem = write_problem(games(1, seed=9)[0])
    folder = tmp_path / "alfworld" / "json_2.1.1" / "valid_seen" / "some-task" / "trial_1"
    folder.mkdir(parents=True)
    file = {"grammar": GRAMMAR, "pddl_problem": problem, "solvable": True, "walkthrough": ["look"]}
    (folder / "game.tw-pddl").write_text(json.dumps(file))
    downloaded = official_tasks("validation")
    assert downloaded[0]["question"].endswith("Your task is to: put a cup on shelf.")

    row = {"id": "valid_seen/some-task/trial_1", "task": "put a cup on shelf.", "problem": problem}
    packed = tmp_path / "alfworld" / "games.jsonl.xz"
    packed.write_bytes(lzma.compress(json.dumps(row).encode()))
    assert official_tasks("validation") == downloaded
    with pytest.raises(DataError, match="no game of valid_unseen"):
        official_tasks("test")
    packed.write_bytes(lzma.compress(b'{"id": "train/x"}\n'))
    with pytest.raises(DataError, match=r"line 1 is not a game: it needs a task"):
        official_tasks("train")
    packed.write_bytes(b"no archive")
    with pytest.raises(DataError, match="cannot be read"):
        official_tasks("train")


def test_games_of_older_versions_are_rejected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AGENTFLY_DATA", str(tmp_path))
    folder = tmp_path / "alfworld" / "json_2.1.1" / "train" / "some-task" / "trial_1"
    folder.mkdir(parents=True)
    (folder / "game.tw-pddl").write_text(json.dumps({"grammar": "put {o} in/on {r}"}))
    with pytest.raises(DataError, match=r"before 0\.4"):
        official_tasks("train")
