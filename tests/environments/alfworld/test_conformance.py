"""Our household compared with the official engine: its recorded output, or the engine itself where it is installed."""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentfly.environments.alfworld import ALFWorld
from agentfly.environments.alfworld.game import ALFWorldGame
from agentfly.environments.alfworld.household import Household
from agentfly.environments.alfworld.tasks import ALFWORLD, OfficialGame, official_games
from agentfly.errors import DataError
from tests.environments.alfworld.official import OfficialEngine
from tests.environments.alfworld.record import TRACES, WEIGHTS, digest, official_texts, replay, wander

SHARED = ("train", "valid_train", "valid_seen")


def shared_games() -> Iterator[OfficialGame]:
    for split in SHARED:
        try:
            yield from official_games(split)
        except DataError as error:
            pytest.skip(f"the official games are not here: {error}")


@pytest.fixture(scope="module")
def traces() -> dict[str, Any]:
    traces: dict[str, Any] = json.loads(lzma.decompress(TRACES.read_bytes()))
    return traces


def follows(game: ALFWorldGame, trace: dict[str, Any]) -> str:
    """Where the household leaves the trace; empty where it follows it to the end."""
    house, commands = Household(game), [None, *trace["commands"]]
    recorded = [trace["digests"][8 * number :][:8] for number in range(len(commands))]
    for number, (command, expected) in enumerate(zip(commands, recorded, strict=True)):
        observation = house.introduction() if command is None else house.step(command)
        if digest(house, observation) != expected:
            return f"after {number} commands, {command!r}: {observation!r}, won {house.won}, {house.commands}"
    return ""


def test_generated_games_match_the_official_engine(traces: dict[str, Any]) -> None:
    games = {name: trace for name, trace in traces.items() if "game" in trace}
    assert len(games) >= 5
    for name, trace in games.items():
        assert not follows(ALFWorldGame.from_json(trace["game"]), trace), name


def test_official_games_match_the_official_engine_and_every_walkthrough_wins(traces: dict[str, Any]) -> None:
    played, left = 0, {name for name, trace in traces.items() if "game" not in trace}
    for official in shared_games():
        game = official.parse()
        house = Household(game)
        assert not house.won, official.id
        for command in official.walkthrough:
            assert command in house.commands, (official.id, command)
            house.step(command)
        assert house.won, official.id
        if official.id in traces:
            assert not follows(game, traces[official.id]), official.id
            left.remove(official.id)
        played += 1
    assert played > 300
    assert not left


def test_traces_cover_every_command(traces: dict[str, Any]) -> None:
    """A recording in which nothing was heated would prove nothing about heating."""
    verbs = {command.split()[0] for trace in traces.values() for command in trace["commands"] if command.strip()}
    assert verbs >= set(WEIGHTS)


def test_the_official_engine_agrees_live(tmp_path: Path) -> None:
    for module in ("textworld", "fast_downward", "alfworld"):
        pytest.importorskip(module, reason="the official engine is in the extra 'alfworld'")
    row = ALFWorld.draw_tasks("test", 1, seed=3, kinds=["pick_heat_then_place_in_recep"])[0]
    game = ALFWorldGame.from_json(row["game"])
    played: list[tuple[ALFWorldGame, dict[str, str]]] = [(game, {})]
    try:
        official = next(official_games("validation"))
        played.append(
            (official.parse(), official_texts(official) if (ALFWORLD.path() / "domain.pddl").is_file() else {})
        )
    except DataError:
        pass  # the generated one is still played
    for number, (alfworld_game, texts) in enumerate(played):
        commands = wander(alfworld_game, 1000 + number)[:12]
        engine = OfficialEngine(alfworld_game, **texts)
        assert list(replay(engine, commands)) == list(replay(Household(alfworld_game), commands))
        engine.close()
