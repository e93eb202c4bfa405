"""The rules, in a small kitchen."""

from __future__ import annotations

import dataclasses
import json

import pytest

from agentfly.environments.alfworld.game import ALFWorldGame, ALFWorldGoal, Receptacle, TaskType, Thing
from agentfly.environments.alfworld.household import Household
from agentfly.environments.alfworld.pddl import read_problem
from agentfly.errors import DataError
from tests.environments.alfworld.official import write_problem

KITCHEN = ALFWorldGame(
    task="put a hot apple in fridge.",
    goal=ALFWorldGoal(TaskType.HEAT, "Apple", "Fridge"),
    start=0,
    receptacles=(
        Receptacle("countertop 1", "CounterTop", 1),
        Receptacle("fridge 1", "Fridge", 2, openable=True),
        Receptacle("microwave 1", "Microwave", 3, openable=True),
        Receptacle("shelf 1", "Shelf", 1),
        Receptacle("sinkbasin 1", "SinkBasin", 4),
    ),
    things=(
        Thing("apple 1", "Apple", ("countertop 1",), (1,),
              frozenset({"pickupable", "heatable", "coolable", "cleanable", "sliceable"})),
        Thing("desklamp 1", "DeskLamp", ("shelf 1",), (1,), frozenset({"toggleable"})),
        Thing("knife 1", "Knife", ("shelf 1",), (1,), frozenset({"pickupable"})),
    ),
    fits={"CounterTop": frozenset({"Apple", "Knife"}), "Fridge": frozenset({"Apple"}), "Shelf": frozenset({"Apple"})},
)  # fmt: skip


def play(*commands: str, game: ALFWorldGame = KITCHEN) -> Household:
    house = Household(game)
    for command in commands:
        assert command in house.commands
        house.step(command)
    return house


def test_a_hot_apple_in_the_fridge_wins() -> None:
    house = play("go to countertop 1", "take apple 1 from countertop 1", "go to fridge 1", "open fridge 1")
    assert not house.won
    house.step("move apple 1 to fridge 1")
    assert not house.won  # a raw one does not count
    for command in ("take apple 1 from fridge 1", "go to microwave 1", "heat apple 1 with microwave 1"):
        assert house.step(command) != "Nothing happens."
    assert house.step("examine apple 1") == "This is a hot apple 1."
    house.step("go to fridge 1")
    house.step("move apple 1 to fridge 1")
    assert house.won


def test_cooled_thing_is_not_hot() -> None:
    house = play("go to countertop 1", "take apple 1 from countertop 1", "go to microwave 1",
                   "heat apple 1 with microwave 1", "go to fridge 1", "cool apple 1 with fridge 1")  # fmt: skip
    assert house.step("examine apple 1") == "This is a cold apple 1."
    assert "isHot" not in house.traits["apple 1"]


def test_closed_fridge_hides_its_contents() -> None:
    closed = dataclasses.replace(
        KITCHEN, things=(dataclasses.replace(KITCHEN.things[0], inside=("fridge 1",), at=(2,)), *KITCHEN.things[1:])
    )
    house = play("go to fridge 1", game=closed)
    assert house.step("take apple 1 from fridge 1") == "Nothing happens."
    assert house.step("examine fridge 1") == "The fridge 1 is closed."
    assert "a apple 1" in house.step("open fridge 1")


@pytest.mark.parametrize(
    "command", ["", "Look", "go to", "go to fridge 9", "take apple 1 from shelf 1", "x" * 1_000_000]
)
def test_inadmissible_command_changes_nothing(command: str) -> None:
    house = play("go to countertop 1")
    commands_before = house.commands
    assert house.step(command) == "Nothing happens."
    assert house.commands == commands_before


def test_only_one_thing_can_be_held() -> None:
    house = play("go to countertop 1", "take apple 1 from countertop 1")
    assert not any(command.startswith("take") for command in house.commands)


def test_only_a_knife_slices() -> None:
    house = play("go to countertop 1", "take knife 1 from shelf 1", "slice apple 1 with knife 1",
                   "move knife 1 to countertop 1", "take apple 1 from countertop 1")  # fmt: skip
    assert house.step("examine apple 1") == "This is a sliced apple 1."
    assert not any(command.startswith("slice") for command in house.commands)


def test_games_share_no_state() -> None:
    play("go to countertop 1", "use desklamp 1", "take apple 1 from countertop 1")
    fresh = Household(KITCHEN)
    assert fresh.held is None
    assert "isToggled" not in fresh.traits["desklamp 1"]
    assert "a apple 1" in fresh.step("go to countertop 1")


@pytest.mark.parametrize("kind", TaskType)
def test_a_game_survives_json_and_the_planning_language(kind: TaskType) -> None:
    target = "DeskLamp" if kind is TaskType.LOOK else "Fridge"
    game = dataclasses.replace(KITCHEN, goal=ALFWorldGoal(kind, "Apple", target))
    assert ALFWorldGame.from_json(json.loads(json.dumps(game.to_json()))) == game
    assert read_problem(write_problem(game), game.task) == game


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        ("a house", "not an ALFWorld game"),
        ({**KITCHEN.to_json(), "goal": {"kind": "dance"}}, "dance"),
        ({**KITCHEN.to_json(), "things": [{"name": "cup 1", "type": "Cup", "inside": ["attic 1"]}]}, "attic 1"),
        ({**KITCHEN.to_json(), "things": [{"name": "cup 1", "type": "Cup", "traits": ["heavy"]}]}, "heavy"),
        ({**KITCHEN.to_json(), "things": [{"name": "shelf 1", "type": "Cup"}]}, "shelf 1"),
        ({**KITCHEN.to_json(), "receptacles": [{"name": "shelf 1", "typ": "Shelf"}]}, "typ"),
    ],
)
def test_malformed_game_is_rejected(broken: object, says: str) -> None:
    with pytest.raises(DataError, match=says):
        ALFWorldGame.from_json(broken)


def test_a_problem_of_another_domain_is_rejected() -> None:
    with pytest.raises(DataError, match="not an ALFWorld planning problem"):
        read_problem("(define (problem x))", "")
    with pytest.raises(DataError, match="none of the six task types"):
        read_problem(write_problem(KITCHEN).replace("isHot ?o", "isRed ?o"), "")
